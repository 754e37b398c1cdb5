// SPDX-License-Identifier: Apache-2.0
// Every checkpoint layout: fixtures of an independent writer with their expected values and logits, and the generated
// model T0 written in every layout with random variations.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/file.h"
#include "base/rng.h"
#include "model/model_helpers.h"
#include "model/weight_source.h"
#include "ops/linear/linear.h"
#include "testing/checkpoint_layouts.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

using testing::Layout;

std::vector<float> values_of(const Matrix& matrix) {
  const ops::WeightView& view = matrix.view;
  std::vector<float> values(static_cast<size_t>(view.rows * view.cols));
  for (int64_t r = 0; r < view.rows; ++r) ops::decode_weight_row(view, r, values.data() + r * view.cols);
  for (float& value : values) value *= view.tensor_scale;
  return values;
}

std::vector<float> part_of(const std::vector<float>& values, int64_t cols, const WeightSlice& slice) {
  std::vector<float> out;
  for (int64_t r = slice.row_begin; r < slice.row_end; ++r) {
    out.insert(out.end(), values.begin() + r * cols + slice.col_begin, values.begin() + r * cols + slice.col_end);
  }
  return out;
}

// What of a tensor is this rank's, as the checkpoint stores it.
WeightSlice slice_in(const WeightSource& weights, WeightRow row) {
  row.scale_rows = rows_of_a_scale(weights.stored(row.name).format);
  return slice_of(row, weights.config(), weights.shard());
}

struct Outputs {
  std::vector<float> logits;
  std::vector<float> draft;  // row t from the streams of token t and the id of token t + 1; empty without a draft block
};

Outputs run(const std::string& folder, std::span<const int32_t> ids) {
  const auto loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  const auto state = loaded.runner->new_sequence(static_cast<int64_t>(ids.size()));
  Outputs out{testing::feed(*loaded.runner, *state, ids.first(ids.size() - 1), LogitRows::kAll), {}};
  if (loaded.runner->facts().num_draft_layers > 0) {
    const SequenceSlice slice{state.get(), ids.last(ids.size() - 1), LogitRows::kAll};
    const TensorView view = loaded.runner->draft({&slice, 1});
    out.draft.assign(view.as<float>(), view.as<float>() + view.shape.num_elements());
  }
  const std::vector<float> last = testing::feed(*loaded.runner, *state, ids.last(1), LogitRows::kLast);
  out.logits.insert(out.logits.end(), last.begin(), last.end());
  return out;
}

TEST(Formats, FixturesGiveTheirExpectedValues) {
  const std::string shared = testing::shared_data();
  if (shared.empty()) GTEST_SKIP() << "TESSERA_SHARED_DATA does not name the fixtures";
  for (const char* layout : {"official", "base", "modelopt-nvfp4", "modelopt-unequal", "compressed-tensors",
                             "hf-single", "hf-fused", "unaligned"}) {
    SCOPED_TRACE(layout);
    const std::string folder = shared + "/formats/" + layout;
    const Config config = load_config(folder);
    // The folder also holds expected.safetensors, which is not part of the model: model.safetensors alone is read.
    const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder);
    const testing::Goldens expected(folder + "/expected.safetensors");
    const int64_t num_drafts = expected.has("mtp_logits") ? 1 : 0;
    WeightSource weights(source, config, num_drafts, {}, nullptr);
    EXPECT_TRUE(weights.unknown().empty());
    EXPECT_TRUE(weights.kept_aside().empty());
    int compared = 0;
    for (const WeightRow& row : make_weight_spec(config, num_drafts)) {
      if (row.kind != WeightKind::kLinear || !expected.has(row.name + ".weight")) continue;
      EXPECT_TRUE(testing::same_bits(values_of(weights.load_matrix(row.name)), expected.floats(row.name + ".weight")))
          << row.name;
      ++compared;
    }
    EXPECT_GT(compared, 60) << "two layers of experts, attention and shared experts";
    const std::vector<int32_t> ids = expected.ints("input_ids");
    const std::vector<float> last = expected.floats("logits");
    const Outputs found = run(folder, ids);
    EXPECT_TRUE(testing::is_close(std::span(found.logits).last(last.size()), last, 1e-5));
    EXPECT_EQ(found.draft.empty(), num_drafts == 0);
    if (num_drafts == 0) continue;
    const std::vector<float> draft = expected.floats("mtp_logits");
    EXPECT_TRUE(testing::is_close(std::span(found.draft).last(draft.size()), draft, 1e-5));
  }
}

class LayoutTest : public ::testing::TestWithParam<Layout> {
 protected:
  LayoutTest() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {
    testing::write_generated_model(testing::Generated::kT0, folder_.path());
    config_ = load_config(folder_.path());
    plain_ = testing::read_tensors(folder_.path());
    written_ = testing::make_layout(GetParam(), plain_, config_, rng_);
  }
  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
  testing::TemporaryFolder folder_;
  Config config_;
  testing::Tensors plain_;
  testing::LayoutModel written_;
};

// Whole, as two ranks' slices, and as any rows and columns that groups allow: the values that were written.
TEST_P(LayoutTest, ValuesAndSlicesAreThoseWritten) {
  if (rng_.below(2) == 0) {
    testing::write_tensors(folder_.path(), written_.tensors);
  } else {
    testing::write_odd_tensors(folder_.path(), written_.tensors, rng_);
  }
  const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder_.path());
  WeightSource whole(source, config_, 1, {}, nullptr);
  WeightSource ranks[] = {{source, config_, 1, {0, 2}, nullptr}, {source, config_, 1, {1, 2}, nullptr}};
  MatrixReader reader(nullptr);
  for (const WeightRow& row : make_weight_spec(config_, 1)) {
    if (row.kind != WeightKind::kLinear) continue;
    SCOPED_TRACE(row.name);
    const std::vector<float>& expected = written_.values.at(row.name);
    const Matrix all = whole.load_matrix(row.name);
    ASSERT_TRUE(testing::same_bits(values_of(all), expected));
    for (int64_t r = 0; r < 2; ++r) {
      const WeightSlice slice = slice_in(ranks[r], row);
      const Matrix part = ranks[r].load_matrix(row.name);
      EXPECT_EQ(part.view.format, ranks[r].format(row.name));
      ASSERT_TRUE(testing::same_bits(values_of(part), part_of(expected, row.shape[1], slice))) << "rank " << r;
      if (part.view.format == ops::WeightFormat::kNvfp4 && part.view.rows > 0) {
        EXPECT_EQ(part.view.tensor_scale, all.view.tensor_scale);
      }
    }
    // Whatever the cut, FP8 blocks included.
    WeightSlice cut;
    cut.row_begin = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(row.shape[0])));
    cut.row_end =
        cut.row_begin + 1 + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(row.shape[0] - cut.row_begin)));
    cut.col_begin = 16 * static_cast<int64_t>(rng_.below(static_cast<uint64_t>(row.shape[1] / 16)));
    cut.col_end =
        cut.col_begin +
        16 * (1 + static_cast<int64_t>(rng_.below(static_cast<uint64_t>((row.shape[1] - cut.col_begin) / 16))));
    const StoredTensor& stored = whole.stored(row.name);
    int exponent = 0;
    if (stored.format == StoredFormat::kMxfp4) std::frexp(all.view.tensor_scale, &exponent);
    ASSERT_TRUE(testing::same_bits(values_of(reader.read(stored, row.shape, cut, exponent - 1)),
                                   part_of(expected, row.shape[1], cut)));
  }
  for (const Layout layout : {Layout::kOfficial, Layout::kModelOptMixed}) {
    if (layout != GetParam()) continue;
    for (const char* prefix : {"layers.1.ffn.experts.5.", "mtp.0.ffn.experts.3."}) {
      EXPECT_EQ(whole.load_matrix(prefix + std::string("w1")).view.tensor_scale,
                whole.load_matrix(prefix + std::string("w3")).view.tensor_scale);
    }
  }
}

// Every slice loads the same from a file in which all other bytes are NaN: they are not read, so the disk needs not be
// asked for them; and what is asked for is what a rank holds, but for scales of whole blocks and rows of columns.
TEST_P(LayoutTest, NothingIsReadButTheParts) {
  testing::write_odd_tensors(folder_.path(), written_.tensors, rng_);
  const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder_.path());
  std::map<const checkpoint::SafetensorsFile*, std::string> files;  // what each holds
  std::map<const checkpoint::SafetensorsFile*, uint64_t> first_bytes;
  for (const checkpoint::LocatedTensor& tensor : source.tensors()) {
    if (!files.contains(tensor.file)) files[tensor.file] = read_file(tensor.file->path(), 1 << 30);
    uint64_t& first = first_bytes.try_emplace(tensor.file, tensor.entry->file_offset).first->second;
    first = std::min(first, tensor.entry->file_offset);
  }
  const WeightSource whole(source, config_, 1, {}, nullptr);
  for (const Shard& shard : {Shard{}, Shard{1, 2, AttentionSplit::kByGroup, ExpertSplit::kByWidth},
                             Shard{1, 2, AttentionSplit::kWhole, ExpertSplit::kById}}) {
    SCOPED_TRACE(fmt::format("rank {}, experts {}", shard.rank, static_cast<int>(shard.experts)));
    WeightSource weights(source, config_, 1, shard, nullptr);
    auto cut = files;
    for (auto& [file, bytes] : cut) {
      std::fill(bytes.begin() + static_cast<ptrdiff_t>(first_bytes.at(file)), bytes.end(), static_cast<char>(0xff));
    }
    for (const WeightRow& row : make_weight_spec(config_, 1)) {
      uint64_t num_bytes = 0, bytes_of_all = 0;
      for (const checkpoint::FilePart& part : whole.parts_of(row.name, {})) bytes_of_all += part.num_bytes;
      for (const checkpoint::FilePart& part : weights.parts_of(row.name, weights.shard())) {
        const std::string& bytes = files.at(part.file);
        ASSERT_LE(part.offset + part.num_bytes, bytes.size());
        bytes.copy(cut.at(part.file).data() + part.offset, part.num_bytes, part.offset);
        num_bytes += part.num_bytes;
      }
      const StoredFormat format = weights.stored(row.name).format;
      if (format == StoredFormat::kMxfp4) {  // scales that lie far apart are looked at with their codes
        const checkpoint::LocatedTensor& codes = weights.stored(row.name).codes;
        files.at(codes.file)
            .copy(cut.at(codes.file).data() + codes.entry->file_offset, codes.entry->num_bytes,
                  codes.entry->file_offset);
      }
      // A rank's rows and no more, where rows have no scales but their own.
      if (row.kind != WeightKind::kLinear || format == StoredFormat::kMxfp4 || format == StoredFormat::kFp8Block)
        continue;
      const WeightSlice slice = slice_in(weights, row);
      const auto rows = static_cast<uint64_t>(slice.row_end - slice.row_begin);
      const bool is_nvfp4 = format == StoredFormat::kNvfp4 || format == StoredFormat::kNvfp4Reciprocal;
      const uint64_t scalar = is_nvfp4 && rows > 0 ? 4 : 0;
      EXPECT_EQ((num_bytes - scalar) * static_cast<uint64_t>(row.shape[0]), (bytes_of_all - scalar) * rows) << row.name;
    }
    testing::TemporaryFolder other;
    std::filesystem::copy(folder_.path(), other.path());
    for (const auto& [file, bytes] : cut) other.write(std::filesystem::path(file->path()).filename(), bytes);
    const checkpoint::Checkpoint cut_source = checkpoint::Checkpoint::open(other.path());
    WeightSource cut_weights(cut_source, config_, 1, shard, nullptr);
    for (const WeightRow& row : make_weight_spec(config_, 1)) {
      SCOPED_TRACE(row.name);
      if (row.kind == WeightKind::kVector) {
        const device::Tensor found = cut_weights.load_vector(row.name), expected = weights.load_vector(row.name);
        const auto count = static_cast<size_t>(expected.view().shape.num_elements());
        EXPECT_TRUE(testing::same_bits(std::span(found.as<float>(), count), std::span(expected.as<float>(), count)));
      } else if (row.kind == WeightKind::kTable) {
        const device::Tensor found = cut_weights.load_table(row.name), expected = weights.load_table(row.name);
        const auto count = static_cast<size_t>(expected.view().num_bytes());
        EXPECT_TRUE(std::equal(found.as<uint8_t>(), found.as<uint8_t>() + count, expected.as<uint8_t>()));
      } else if (weights.local_shape(row.name)[0] > 0) {
        EXPECT_TRUE(
            testing::same_bits(values_of(cut_weights.load_matrix(row.name)), values_of(weights.load_matrix(row.name))));
      }
    }
  }
}

// What is asked for ahead is all of it once, the head behind the layers and before the drafts.
TEST_P(LayoutTest, PartsComeInTheOrderOfLoading) {
  testing::write_odd_tensors(folder_.path(), written_.tensors, rng_);
  const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder_.path());
  const WeightSource weights(source, config_, 1, {}, nullptr);
  const std::vector<checkpoint::FilePart> parts = weights.parts_in_order();
  const auto place = [&](const std::string& name) {
    const checkpoint::FilePart first = weights.parts_of(name, weights.shard()).front();
    return std::find_if(parts.begin(), parts.end(), [&](const checkpoint::FilePart& part) {
      return part.file == first.file && part.offset == first.offset;
    });
  };
  size_t count = 0;
  for (const WeightRow& row : make_weight_spec(config_, 1)) {
    EXPECT_NE(place(row.name), parts.end()) << row.name;
    count += weights.parts_of(row.name, weights.shard()).size();
  }
  EXPECT_EQ(count, parts.size());
  EXPECT_EQ(place("embed"), parts.begin());
  EXPECT_LT(place(fmt::format("layers.{}.ffn.shared_experts.w2", config_.num_layers - 1)), place("head"));
  EXPECT_LT(place("head"), place("mtp.0.attn.wq_a"));
}

class RunnableLayoutTest : public LayoutTest {};

// The model computes what it computes on the same values in F32, draft block included.
TEST_P(RunnableLayoutTest, LogitsAreThoseOfTheValues) {
  const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 24);
  testing::write_tensors(folder_.path(), testing::plain_layout(plain_, written_));
  const Outputs expected = run(folder_.path(), ids);
  testing::write_odd_tensors(folder_.path(), written_.tensors, rng_);
  const Outputs found = run(folder_.path(), ids);
  EXPECT_TRUE(testing::is_close(found.logits, expected.logits, 1e-5));
  EXPECT_TRUE(testing::is_close(found.draft, expected.draft, 1e-5));
  testing::write_odd_tensors(folder_.path(), testing::with_hf_names(written_.tensors), rng_);
  EXPECT_TRUE(testing::is_close(run(folder_.path(), ids).logits, expected.logits, 1e-5)) << "Hugging Face names";
}

std::string name_of(const ::testing::TestParamInfo<Layout>& tested) {
  std::string name = testing::to_string(tested.param);
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

constexpr std::span kLayouts(testing::kAllLayouts);
INSTANTIATE_TEST_SUITE_P(All, LayoutTest, ::testing::ValuesIn(kLayouts.begin(), kLayouts.end()), name_of);
// All but the last, whose layers hold experts in different formats.
INSTANTIATE_TEST_SUITE_P(All, RunnableLayoutTest, ::testing::ValuesIn(kLayouts.begin(), kLayouts.end() - 1), name_of);

}  // namespace
}  // namespace tessera::model
