// SPDX-License-Identifier: Apache-2.0
// Conversions of checkpoints that others made: the trained BF16 model against its published NVFP4 form, and one small
// model in every layout against expected logits.
#include <gtest/gtest.h>

#include <cstdlib>

#include "checkpoint/checkpoint.h"
#include "convert/convert_helpers.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/temporary_folder.h"

namespace tessera::convert {
namespace {

using testing::convert_options;

std::vector<uint8_t> read(const checkpoint::LocatedTensor& tensor) {
  std::vector<uint8_t> bytes(tensor.entry->num_bytes);
  tensor.read(bytes.data());
  return bytes;
}

// An independent converter made the bundled model from the same BF16 weights. Its tensor scales are the same, so every
// bit is.
TEST(ConvertFixtures, TinyBf16BecomesTheBundledModel) {
  const char* source = std::getenv("TESSERA_TINY_BF16");
  if (source == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  const testing::TemporaryFolder folder;
  const Result result = convert(source, folder.file("out"), convert_options("experts,shared,attention,indexer"),
                                nullptr, nullptr, nullptr);
  const auto made = checkpoint::Checkpoint::open(folder.file("out")),
             bundled = checkpoint::Checkpoint::open(testing::tiny_model());
  ASSERT_EQ(made.tensors().size(), bundled.tensors().size());
  for (const checkpoint::LocatedTensor& tensor : bundled.tensors()) {
    const checkpoint::LocatedTensor* ours = made.find(tensor.entry->name);
    ASSERT_NE(ours, nullptr) << tensor.entry->name;
    EXPECT_EQ(ours->entry->dtype, tensor.entry->dtype) << tensor.entry->name;
    EXPECT_EQ(ours->entry->shape, tensor.entry->shape) << tensor.entry->name;
    EXPECT_TRUE(read(*ours) == read(tensor)) << tensor.entry->name;
  }
  // About a tenth, and a power-of-two scale costs more on trained weights.
  for (const Family family : {Family::kExperts, Family::kShared, Family::kAttention, Family::kIndexer}) {
    const Statistics& s = result.families[static_cast<size_t>(family)];
    EXPECT_NEAR(s.relative_error(), 0.1, 0.01) << to_string(family);
    EXPECT_GT(s.relative_error_e8m0(), 1.05 * s.relative_error()) << to_string(family);
  }
}

// Four-over-six brings trained weights closer.
TEST(ConvertFixtures, FourOverSixIsCloser) {
  const char* source = std::getenv("TESSERA_TINY_BF16");
  if (source == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  Options options = convert_options("experts,attention");
  options.is_trial = true;
  const Result amax = convert(source, "", options, nullptr, nullptr, nullptr);
  options.rule = numeric::Nvfp4WeightRule::kFourOverSix;
  const Result better = convert(source, "", options, nullptr, nullptr, nullptr);
  for (const Family family : {Family::kExperts, Family::kAttention}) {
    const auto f = static_cast<size_t>(family);
    EXPECT_LT(better.families[f].relative_error(), 0.95 * amax.families[f].relative_error()) << to_string(family);
  }
}

class Layouts : public ::testing::TestWithParam<const char*> {};

std::vector<float> last_logits(const std::string& folder, const std::vector<int32_t>& ids, int64_t rows) {
  const model::LoadedModel loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  const auto state = loaded.runner->new_sequence(static_cast<int64_t>(ids.size()));
  std::vector<float> logits = testing::feed(*loaded.runner, *state, ids, model::LogitRows::kAll);
  logits.erase(logits.begin(), logits.end() - rows * loaded.runner->facts().vocab_size);
  return logits;
}

// What was 4 bits already keeps its values, so the converted checkpoint gives the source's expected logits.
TEST_P(Layouts, ConvertsAndStaysExactWhereExpertsWereFourBits) {
  const std::string data = testing::shared_data();
  if (data.empty()) GTEST_SKIP() << "TESSERA_SHARED_DATA does not name the data folder";
  const std::string source = data + "/formats/" + GetParam();
  const testing::TemporaryFolder folder;
  const Result result =
      convert(source, folder.file("out"), convert_options("experts", 300'000), nullptr, nullptr, nullptr);
  const Statistics& experts = result.families[static_cast<size_t>(Family::kExperts)];
  const testing::Goldens expected(source + "/expected.safetensors");
  const Shape shape = expected.shape("logits");
  const std::vector<float> logits = last_logits(folder.file("out"), expected.ints("input_ids"), shape[0]);
  if (experts.num_rounded == 0) {
    EXPECT_EQ(experts.relative_error(), 0);
    EXPECT_TRUE(testing::is_close(logits, expected.floats("logits"), 1e-5));
  } else {
    // Experts in BF16, FP32 or FP8 are rounded; the outcome must still be the source's own, were it rounded on load.
    EXPECT_GT(experts.relative_error(), 0.01);
    const auto out = checkpoint::Checkpoint::open(folder.file("out"));
    EXPECT_EQ(out.find("layers.0.ffn.experts.0.w1.weight")->entry->dtype, DType::kU8);
  }
  // Again: now everything is NVFP4 and nothing changes.
  convert(folder.file("out"), folder.file("again"), convert_options("experts", 300'000), nullptr, nullptr, nullptr);
  EXPECT_EQ(testing::content_of(folder.file("out/hashes.json")), testing::content_of(folder.file("again/hashes.json")));
}

INSTANTIATE_TEST_SUITE_P(All, Layouts,
                         ::testing::Values("official", "base", "modelopt-nvfp4", "modelopt-unequal",
                                           "compressed-tensors", "hf-single", "hf-fused", "unaligned"),
                         [](const auto& layout) {
                           std::string name = layout.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace tessera::convert
