// SPDX-License-Identifier: Apache-2.0
// Conversions of generated models: what the output holds, that it loads, and that its bytes depend on nothing but
// source and options.
#include "convert/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/tensor_hashes.h"
#include "convert/convert_helpers.h"
#include "model/model_helpers.h"
#include "numeric/mxfp4_to_nvfp4.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/op_harness.h"
#include "testing/temporary_folder.h"

namespace tessera::convert {
namespace {

namespace fs = std::filesystem;
using testing::all_files;
using testing::content_of;
using testing::convert_error;
using testing::convert_options;
using ::testing::HasSubstr;

void run(const std::string& in, const std::string& out, const Options& options) {
  convert(in, out, options, nullptr, nullptr, nullptr);
}

std::vector<uint8_t> bytes_of(const checkpoint::Checkpoint& checkpoint, const std::string& name) {
  const checkpoint::LocatedTensor* tensor = checkpoint.find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << "no tensor " << name;
    return {};
  }
  std::vector<uint8_t> bytes(tensor->entry->num_bytes);
  tensor->read(bytes.data());
  return bytes;
}

class Convert : public testing::RandomTest {
 protected:
  Convert() {
    fs::create_directory(source());
    testing::write_generated_model(testing::Generated::kT0, source());
    std::ofstream(source() + "/tokenizer.json") << "{\"a\": 1}";
    std::ofstream(source() + "/LICENSE") << "free";
    std::ofstream(source() + "/.hidden") << "x";
  }
  std::string source() const { return folder_.file("in"); }
  std::string out(const std::string& name = "out") const { return folder_.file(name); }
  // Replaces tensors of the source.
  void edit(const std::function<void(std::map<std::string, std::pair<TensorView, std::string>>&)>& change);

  testing::TemporaryFolder folder_;
};

void Convert::edit(const std::function<void(std::map<std::string, std::pair<TensorView, std::string>>&)>& change) {
  std::map<std::string, std::pair<TensorView, std::string>> tensors;  // the view's data is in the string
  {
    const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(source());
    for (const checkpoint::LocatedTensor& tensor : checkpoint.tensors()) {
      auto& [view, data] = tensors[tensor.entry->name];
      view = {nullptr, *tensor.entry->dtype, tensor.entry->shape};
      data.resize(tensor.entry->num_bytes);
      tensor.read(data.data());
    }
  }
  change(tensors);
  std::vector<std::pair<std::string, TensorView>> named;
  for (auto& [name, tensor] : tensors) {
    tensor.first.data = tensor.second.data();
    named.emplace_back(name, tensor.first);
  }
  checkpoint::write_safetensors(source() + "/model.safetensors", named);
}

TEST_F(Convert, ChosenFamiliesAreRoundedAndTheRestKept) {
  run(source(), out(), convert_options("experts,head"));
  const auto before = checkpoint::Checkpoint::open(source()), after = checkpoint::Checkpoint::open(out());
  size_t num_rounded = 0;
  for (const checkpoint::LocatedTensor& tensor : before.tensors()) {
    const std::string& name = tensor.entry->name;
    const bool is_rounded = name == "head.weight" || name.find(".ffn.experts.") != std::string::npos;
    if (!is_rounded) {
      EXPECT_EQ(bytes_of(before, name), bytes_of(after, name)) << name;
      EXPECT_EQ(after.find(name)->entry->dtype, tensor.entry->dtype);
      continue;
    }
    ++num_rounded;
    const int64_t rows = tensor.entry->shape[0], cols = tensor.entry->shape[1];
    const checkpoint::TensorEntry& codes = *after.find(name)->entry;
    EXPECT_EQ(codes.dtype, DType::kU8);
    EXPECT_EQ(codes.shape, (Shape{rows, cols / 2}));
    EXPECT_EQ(after.find(name + "_scale")->entry->dtype, DType::kF8E4M3);
    EXPECT_EQ(after.find(name + "_scale")->entry->shape, (Shape{rows, cols / 16}));
    EXPECT_EQ(after.find(name + "_scale_2")->entry->dtype, DType::kF32);
    EXPECT_EQ(after.find(name + "_scale_2")->entry->shape, (Shape{}));
    // By hand: w1 and w3 share a scale.
    std::vector<uint8_t> values = bytes_of(before, name), other = values;
    if (name.find(".w1.") != std::string::npos || name.find(".w3.") != std::string::npos) {
      std::string partner = name;
      char& digit = partner[partner.find(".w") + 2];
      digit = digit == '1' ? '3' : '1';
      other = bytes_of(before, partner);
    }
    const auto* x = reinterpret_cast<const float*>(values.data());
    const float amax = std::max(numeric::abs_max(x, rows * cols),
                                numeric::abs_max(reinterpret_cast<const float*>(other.data()), rows * cols));
    const float scale = numeric::nvfp4_weight_scale(amax, numeric::Nvfp4WeightRule::kAmax);
    std::vector<uint8_t> expected_codes(static_cast<size_t>(rows * cols / 2)),
        expected_scales(static_cast<size_t>(rows * cols / 16)), expected_scale(4);
    std::memcpy(expected_scale.data(), &scale, 4);
    numeric::nvfp4_quantize_weight_row(x, rows * cols, scale, numeric::Nvfp4WeightRule::kAmax, expected_codes.data(),
                                       expected_scales.data());
    EXPECT_EQ(bytes_of(after, name), expected_codes) << name;
    EXPECT_EQ(bytes_of(after, name + "_scale"), expected_scales) << name;
    EXPECT_EQ(bytes_of(after, name + "_scale_2"), expected_scale) << name;
  }
  EXPECT_EQ(num_rounded, 1u + 6 * 8 * 3);
  EXPECT_EQ(after.tensors().size(), before.tensors().size() + 2 * num_rounded);
  // Small files, hashes, and nothing else.
  const testing::TemporaryFolder& folder = folder_;
  std::string listing;
  for (const auto& [name, content] : all_files(folder.file("out"))) listing += name + " ";
  EXPECT_EQ(listing,
            "LICENSE config.json conversion_report.json conversion_report.svg hashes.json hf_quant_config.json "
            "model.safetensors tokenizer.json ");
  EXPECT_EQ(content_of(out() + "/LICENSE"), "free");
  for (const auto& [name, hash] : checkpoint::load_hashes(out())) {
    EXPECT_EQ(hash, checkpoint::hash_tensor(*after.find(name), nullptr)) << name;
  }
  EXPECT_EQ(checkpoint::load_hashes(out()).size(), after.tensors().size());
}

TEST_F(Convert, EveryFamilyLoadsAndRuns) {
  const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 20);
  const auto logits = [&](const std::string& folder) {
    const model::LoadedModel loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
    const auto state = loaded.runner->new_sequence(20);
    return testing::feed(*loaded.runner, *state, ids, model::LogitRows::kAll);
  };
  const std::vector<float> exact = logits(source());
  for (const char* families : {"experts", "shared", "attention", "compressor", "indexer", "head", "all"}) {
    SCOPED_TRACE(families);
    run(source(), out(families), convert_options(families));
    const std::vector<float> rounded = logits(out(families));
    const double error = testing::relative_error(rounded, exact);
    // Something was rounded; the indexer's weights only choose entries.
    EXPECT_GT(error, std::string_view(families) == "indexer" ? -1 : 1e-4);
    EXPECT_LT(error, 0.7);  // generated weights are noise: rounding moves logits, but doesn't replace them
  }
}

TEST_F(Convert, BytesDependOnSourceAndOptionsAlone) {
  for (const numeric::Nvfp4WeightRule rule :
       {numeric::Nvfp4WeightRule::kAmax, numeric::Nvfp4WeightRule::kFourOverSix}) {
    Options options = convert_options("all", 200'000);
    options.rule = rule;
    options.num_threads = 1;
    run(source(), out("a"), options);
    options.num_threads = 5;
    run(source(), out("b"), options);
    const auto a = all_files(out("a")), b = all_files(out("b"));
    EXPECT_EQ(a, b);
    EXPECT_GT(checkpoint::Checkpoint::open(out("a")).num_files(), 3u);
    // Sharding changes where tensors are, not what they are.
    options.max_shard_bytes = 1 << 30;
    run(source(), out("c"), options);
    const auto many = checkpoint::Checkpoint::open(out("a")), one = checkpoint::Checkpoint::open(out("c"));
    EXPECT_EQ(content_of(out("a") + "/hashes.json"), content_of(out("c") + "/hashes.json"));
    for (const checkpoint::LocatedTensor& tensor : one.tensors()) {
      EXPECT_EQ(bytes_of(one, tensor.entry->name), bytes_of(many, tensor.entry->name));
    }
    for (const char* name : {"a", "b", "c"}) fs::remove_all(out(name));
  }
}

TEST_F(Convert, ShardsKeepToTheSize) {
  run(source(), out(), convert_options("experts", 100'000));
  size_t count = 0;
  for (const auto& [name, content] : all_files(out())) {
    if (!name.ends_with(".safetensors")) continue;
    ++count;
    const auto file = checkpoint::SafetensorsFile::open(out() + "/" + name);
    uint64_t bytes = 0;
    for (const checkpoint::TensorEntry& entry : file.entries()) bytes += entry.num_bytes;
    EXPECT_TRUE(bytes <= 100'000 || file.entries().size() == 1) << name << " holds " << bytes;
  }
  EXPECT_GT(count, 5u);
  EXPECT_TRUE(fs::exists(out() + "/model-00001-of-000" + std::to_string(count) + ".safetensors"));
}

// NVFP4 that is converted again keeps every bit.
TEST_F(Convert, TwiceIsOnce) {
  run(source(), out("once"), convert_options("experts,attention"));
  run(out("once"), out("twice"), convert_options("experts"));
  EXPECT_EQ(content_of(out("once") + "/model.safetensors"), content_of(out("twice") + "/model.safetensors"));
  EXPECT_EQ(content_of(out("once") + "/hashes.json"), content_of(out("twice") + "/hashes.json"));
}

TEST_F(Convert, ConfigSaysWhatModelOptWould) {
  run(source(), out(), convert_options("experts,shared,attention"));
  const auto config = nlohmann::json::parse(content_of(out() + "/config.json"));
  auto without = config;
  without.erase("quantization_config");
  EXPECT_EQ(without, nlohmann::json::parse(content_of(source() + "/config.json")));
  const auto& quantisation = config["quantization_config"];
  EXPECT_EQ(quantisation["quant_method"], "modelopt");
  EXPECT_EQ(quantisation["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(quantisation["moe_quant_algo"], "NVFP4");
  EXPECT_EQ(quantisation["group_size"], 16);
  EXPECT_EQ(quantisation["producer"]["name"], "tessera");
  EXPECT_EQ(quantisation["quantized_layers"]["layers.0.ffn.experts"]["quant_algo"], "NVFP4");
  EXPECT_EQ(quantisation["quantized_layers"]["layers.3.attn.wo_b"]["group_size"], 16);
  EXPECT_EQ(quantisation["quantized_layers"].size(), 6u * 7);  // per layer, draft block included
  EXPECT_THAT(quantisation["ignore"], ::testing::IsSupersetOf({"embed", "head", "*.ffn.gate", "*.attn.indexer.wq_b"}));
  const auto hf = nlohmann::json::parse(content_of(out() + "/hf_quant_config.json"));
  EXPECT_EQ(hf["quantization"]["exclude_modules"], quantisation["ignore"]);
}

TEST_F(Convert, OutMustBeEmptyOrForced) {
  fs::create_directory(out());
  std::ofstream(out() + "/notes.txt") << "mine";
  EXPECT_THAT(convert_error(source(), out(), convert_options("experts"), ErrorCode::kInvalidArgument),
              HasSubstr("expected an empty folder, found notes.txt"));
  EXPECT_EQ(all_files(out()).size(), 1u);
  Options options = convert_options("experts", 100'000);
  options.existing = Existing::kReplace;
  run(source(), out(), options);
  EXPECT_EQ(content_of(out() + "/notes.txt"), "mine");
  options = convert_options("experts");
  EXPECT_THAT(convert_error(source(), out(), options, ErrorCode::kInvalidArgument), HasSubstr("--force"));
  options.existing = Existing::kReplace;
  run(source(), out(), options);  // shards and index of before are gone
  EXPECT_EQ(checkpoint::Checkpoint::open(out()).num_files(), 1u);
  EXPECT_FALSE(fs::exists(out() + "/model.safetensors.index.json"));
}

TEST_F(Convert, ImpossibleFolders) {
  EXPECT_THAT(convert_error(source(), "", convert_options("experts"), ErrorCode::kInvalidArgument),
              HasSubstr("expected the name of a folder"));
  Options force = convert_options("experts");
  force.existing = Existing::kReplace;
  EXPECT_THAT(convert_error(source(), "", force, ErrorCode::kInvalidArgument), HasSubstr("name of a folder"));
  EXPECT_THAT(convert_error(source(), source(), convert_options("experts"), ErrorCode::kInvalidArgument),
              HasSubstr("is the source"));
  EXPECT_THAT(
      convert_error(source(), source() + "/tokenizer.json", convert_options("experts"), ErrorCode::kInvalidArgument),
      HasSubstr("expected a folder"));
  EXPECT_THAT(
      convert_error(source(), source() + "/tokenizer.json/x", convert_options("experts"), ErrorCode::kInvalidArgument),
      HasSubstr("cannot create"));
  convert_error(folder_.file("nothing"), out(), convert_options("experts"), ErrorCode::kNotFound);
  EXPECT_FALSE(fs::exists(out()));
}

TEST_F(Convert, TrialMeasuresAndWritesNothing) {
  Options options = convert_options("all");
  options.is_trial = true;
  const Result trial = convert(source(), out(), options, nullptr, nullptr, nullptr);
  EXPECT_FALSE(fs::exists(out()));
  options.is_trial = false;
  const Result real = convert(source(), out(), options, nullptr, nullptr, nullptr);
  for (size_t f = 0; f < kNumFamilies; ++f) {
    EXPECT_EQ(trial.families[f].squared_error, real.families[f].squared_error);
    EXPECT_EQ(trial.families[f].scales, real.families[f].scales);
    EXPECT_GT(real.families[f].num_values, 0);
  }
  EXPECT_EQ(trial.output_bytes, real.output_bytes);
}

TEST_F(Convert, NanAndInfinityAreNamed) {
  const std::string name = "layers.3.ffn.experts.5.w2.weight";
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    edit([&](auto& tensors) {
      std::string& data = tensors[name].second;
      std::memcpy(data.data() + 4 * rng_.below(data.size() / 4), &bad, 4);
    });
    const std::string message = convert_error(source(), out(), convert_options("experts"), ErrorCode::kDataLoss);
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_THAT(message, HasSubstr("a NaN or an infinity"));
    EXPECT_FALSE(fs::exists(out()));  // nothing was finished, so nothing is left
  }
}

// MXFP4 whose blocks are too far apart for one tensor scale.
TEST_F(Convert, InexactMxfp4IsCountedAndRefused) {
  const std::string path = "layers.1.ffn.experts.2.w";
  edit([&](auto& tensors) {
    for (const char* digit : {"1", "3"}) {
      auto& [view, data] = tensors[path + digit + ".weight"];
      const int64_t rows = view.shape[0], cols = view.shape[1];
      view = {nullptr, DType::kI8, {rows, cols / 2}};
      data.assign(static_cast<size_t>(rows * cols / 2), '\x21');
      auto& [scale_view, scales] = tensors[path + digit + ".scale"];
      scale_view = {nullptr, DType::kF8E8M0, {rows, cols / 32}};
      scales.assign(static_cast<size_t>(rows * cols / 32), '\x78');
      if (*digit == '3') scales[0] = scales[5] = '\x60';  // 2^24 below
    }
  });
  const std::string message = convert_error(source(), out(), convert_options("experts"), ErrorCode::kUnsupported);
  EXPECT_THAT(message, HasSubstr(path + "1.weight"));
  EXPECT_THAT(message, HasSubstr("found 2 "));
  Options options = convert_options("experts");
  options.allow_inexact = true;
  const Result result = convert(source(), out(), options, nullptr, nullptr, nullptr);
  EXPECT_EQ(result.families[0].num_inexact_blocks, 2);
  EXPECT_EQ(result.families[0].num_exact, 2);
  const auto after = checkpoint::Checkpoint::open(out());
  const std::vector<uint8_t> codes = bytes_of(after, path + "1.weight");
  EXPECT_EQ(codes, std::vector<uint8_t>(codes.size(), 0x21));
  float scale = 0;
  after.find(path + "3.weight_scale_2")->read(&scale);
  EXPECT_EQ(scale, 0x1p-15f);  // 2^-7 is the largest block: E4M3's 2^8 times 2^-15
}

TEST_F(Convert, TooFullADisk) {
  // A shape of many terabytes in a file with holes: refused before anything is made.
  edit([](auto& tensors) { tensors["mtp.9.extra.weight"] = {{nullptr, DType::kU8, {16}}, std::string(16, 'x')}; });
  const auto bytes = content_of(source() + "/model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  const int64_t data_bytes = static_cast<int64_t>(bytes.size() - 8 - header_bytes), huge = int64_t{3} << 40;
  header["zzz"] = {{"dtype", "U8"}, {"shape", {huge}}, {"data_offsets", {data_bytes, data_bytes + huge}}};
  const std::string text = header.dump();
  const std::string path = source() + "/model.safetensors";
  {
    std::ofstream file(path, std::ios::binary);
    const uint64_t length = text.size();
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << text << bytes.substr(8 + header_bytes);
  }
  std::error_code error;
  fs::resize_file(path, 8 + text.size() + static_cast<uint64_t>(data_bytes + huge), error);
  if (error) GTEST_SKIP() << "this file system has no files with holes of 3 TiB";
  EXPECT_THAT(convert_error(source(), out(), convert_options("experts"), ErrorCode::kResourceExhausted),
              HasSubstr("are missing"));
  EXPECT_FALSE(fs::exists(out()));
}

}  // namespace
}  // namespace tessera::convert
