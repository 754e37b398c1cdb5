// SPDX-License-Identifier: Apache-2.0
// What a checkpoint in each format gets when one thing is wrong with it; MXFP4 that NVFP4 can't hold exactly; and
// tensors that are known, unknown, or said twice.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "backends/registry.h"
#include "base/error.h"
#include "base/rng.h"
#include "model/draft_names.h"
#include "model/model_helpers.h"
#include "model/weight_source.h"
#include "numeric/mxfp4.h"
#include "ops/linear/linear.h"
#include "testing/checkpoint_layouts.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

using testing::Layout;
using testing::Stored;

class FormatFaults : public ::testing::Test {
 protected:
  FormatFaults() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {
    testing::write_generated_model(testing::Generated::kT0, folder_.path());
    config_ = load_config(folder_.path());
    plain_ = testing::read_tensors(folder_.path());
  }

  void write(Layout layout) { tensors_ = testing::make_layout(layout, plain_, config_, rng_).tensors; }

  WeightSource open(Inexact inexact = Inexact::kRefuse, Shard shard = {}) {
    testing::write_tensors(folder_.path(), tensors_);
    checkpoints_.push_back(std::make_unique<checkpoint::Checkpoint>(checkpoint::Checkpoint::open(folder_.path())));
    return WeightSource(*checkpoints_.back(), config_, 1, shard, nullptr, inexact);
  }

  // The message of opening the checkpoint and loading one map: one line, or empty where nothing is wrong.
  std::string error(const std::string& path, Inexact inexact = Inexact::kRefuse) {
    try {
      open(inexact).load_matrix(path);
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_TRUE(error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      return message;
    }
    return "";
  }

  struct Case {
    const char* what;
    const char* says;  // part of the message, besides the map's name
    std::function<void()> change;
  };
  void expect_faults(const std::string& path, const std::vector<Case>& cases) {
    EXPECT_EQ(error(path), "");
    const testing::Tensors good = tensors_;
    for (const Case& broken : cases) {
      broken.change();
      const std::string message = error(path);
      EXPECT_NE(message.find(path), std::string::npos) << broken.what << ": " << message;
      EXPECT_NE(message.find(broken.says), std::string::npos) << broken.what << ": " << message;
      tensors_ = good;
    }
  }

  void set_float(const std::string& name, float value) { std::memcpy(tensors_.at(name).bytes.data(), &value, 4); }

  // The other dtypes that a tensor must not have, as faults.
  void add_wrong_dtypes(std::vector<Case>& cases, const std::string& name, std::vector<DType> allowed) {
    for (const DType dtype : {DType::kI8, DType::kU8, DType::kI32, DType::kF16, DType::kF32, DType::kF64, DType::kBF16,
                              DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0, DType::kBool}) {
      if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) continue;
      cases.push_back({"wrong dtype", "expected", [this, name, dtype] {
                         Stored& stored = tensors_.at(name);
                         stored.dtype = dtype;
                         stored.bytes.assign(static_cast<size_t>(stored.shape.num_elements() * dtype_bits(dtype) / 8),
                                             0x38);
                       }});
    }
  }
  // One row more, one column less, flat.
  void add_wrong_shapes(std::vector<Case>& cases, const std::string& name) {
    const Shape shape = tensors_.at(name).shape;
    for (const Shape& wrong : {Shape{shape[0] + 1, shape[1]}, Shape{shape[0], shape[1] + 1}, Shape{shape[0] * shape[1]},
                               Shape{shape[0], shape[1], 1}, Shape{0, shape[1]}}) {
      cases.push_back({"wrong shape", "expected", [this, name, wrong] {
                         Stored& stored = tensors_.at(name);
                         stored.shape = wrong;
                         stored.bytes.resize(static_cast<size_t>(wrong.num_elements() * dtype_bits(stored.dtype) / 8));
                       }});
    }
  }
  // The same tensor under a second name.
  void add_second_name(std::vector<Case>& cases, const std::string& name, const std::string& other) {
    cases.push_back({"two names", "one name only", [this, name, other] { tensors_[other] = tensors_.at(name); }});
  }

  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
  testing::TemporaryFolder folder_;
  Config config_;
  testing::Tensors plain_, tensors_;
  std::vector<std::unique_ptr<checkpoint::Checkpoint>> checkpoints_;  // outlive the sources
};

// The official spelling of an MXFP4 map, whatever the writer chose.
void make_official(testing::Tensors& tensors, const std::string& path, const Shape& shape) {
  for (const auto& [from, to] : {std::pair{".weight_packed", ".weight"}, {".weight_scale", ".scale"}}) {
    if (!tensors.contains(path + from)) continue;
    tensors[path + to] = tensors.at(path + from);
    tensors.erase(path + from);
  }
  Stored& codes = tensors.at(path + ".weight");
  codes.dtype = DType::kI8, codes.shape = {shape[0], shape[1] / 2};
  tensors.at(path + ".scale").dtype = DType::kF8E8M0;
}

TEST_F(FormatFaults, Mxfp4) {
  write(Layout::kOfficial);
  const std::string path = "layers.2.ffn.experts.3.w3";
  make_official(tensors_, path, {32, 64});
  std::vector<Case> cases = {
      {"no scales", "no such tensor", [&] { tensors_.erase(path + ".scale"); }},
      {"NaN scale", "element 7", [&] { tensors_.at(path + ".scale").bytes[7] = 0xFF; }},
      {"a tensor scale beside it", "no tensor scale",
       [&] {
         tensors_[path + ".weight_scale_2"] = {DType::kF32, {}, {0, 0, 128, 63}};
       }},
      {"NVFP4's width", "shape",
       [&] {
         tensors_[path + ".scale"] = {DType::kF8E8M0, {32, 4}, std::vector<uint8_t>(128, 120)};
       }},
  };
  add_wrong_dtypes(cases, path + ".scale", {DType::kF8E8M0, DType::kU8});
  add_wrong_shapes(cases, path + ".scale");
  add_wrong_dtypes(cases, path + ".weight", {DType::kI8, DType::kU8});
  add_wrong_shapes(cases, path + ".weight");
  add_second_name(cases, path + ".scale", path + ".weight_scale");
  add_second_name(cases, path + ".weight", path + ".weight_packed");
  expect_faults(path, cases);

  // A NaN in w1 also stops w3, which shares its global, and goes on doing so.
  make_official(tensors_, "layers.2.ffn.experts.3.w1", {32, 64});
  tensors_.at("layers.2.ffn.experts.3.w1.scale").bytes[1] = 0xFF;
  WeightSource source = open();
  for (int again = 0; again < 2; ++again) EXPECT_THROW(source.load_matrix(path), Error);
}

TEST_F(FormatFaults, CompressedTensors) {
  write(Layout::kCompressedTensors);
  const std::string path = "layers.0.ffn.experts.6.w1", global = path + ".weight_global_scale";
  std::vector<Case> cases = {
      {"no block scales", "no such tensor", [&] { tensors_.erase(path + ".weight_scale"); }},
      {"no global", "no such tensor", [&] { tensors_.erase(global); }},
      {"ModelOpt's global instead", "instead",
       [&] {
         tensors_[path + ".weight_scale_2"] = tensors_.at(global);
         tensors_.erase(global);
       }},
      {"two global scales", "one F32 value",
       [&] {
         tensors_[global] = {DType::kF32, {2}, std::vector<uint8_t>(8, 63)};
       }},
      {"NaN block scale", "element 9", [&] { tensors_.at(path + ".weight_scale").bytes[9] = 0x7F; }},
      {"negative block scale", "element 9", [&] { tensors_.at(path + ".weight_scale").bytes[9] = 0x81; }},
  };
  for (const float bad : {0.0f, -1.0f, INFINITY, -INFINITY, std::nanf(""), 1e-44f, -0.0f}) {
    cases.push_back({"bad global", "finite scale > 0", [this, global, bad] { set_float(global, bad); }});
  }
  add_wrong_dtypes(cases, global, {DType::kF32});
  add_wrong_dtypes(cases, path + ".weight_packed", {DType::kU8});
  add_wrong_shapes(cases, path + ".weight_packed");
  add_wrong_dtypes(cases, path + ".weight_scale", {DType::kF8E4M3});
  add_wrong_shapes(cases, path + ".weight_scale");
  add_second_name(cases, path + ".weight_packed", path + ".weight");
  add_second_name(cases, global, path + ".weight_scale_2");
  expect_faults(path, cases);
}

TEST_F(FormatFaults, Fp8Blocks) {
  const std::pair<Layout, const char*> spellings[] = {{Layout::kOfficial, ".scale"},
                                                      {Layout::kBase, ".scale"},
                                                      {Layout::kFp8Inverse, ".weight_scale_inv"},
                                                      {Layout::kCompressedTensors, ".weight_scale"}};
  for (const auto& [layout, suffix] : spellings) {
    SCOPED_TRACE(testing::to_string(layout));
    write(layout);
    const std::string path = "layers.1.attn.wq_b", scale = path + suffix;  // [512, 32]: four blocks
    std::vector<Case> cases = {
        {"no scales", "no such tensor", [&] { tensors_.erase(scale); }},
        {"NaN code", "element 77", [&] { tensors_.at(path + ".weight").bytes[77] = 0xFF; }},
    };
    if (tensors_.at(scale).dtype == DType::kF8E8M0) {
      cases.push_back({"NaN scale", "element 2", [&] { tensors_.at(scale).bytes[2] = 0xFF; }});
    } else {
      const size_t width = tensors_.at(scale).bytes.size() / 4;
      for (const uint8_t top : {0x7F, 0xFF, 0xBF}) {  // NaN, NaN, negative
        cases.push_back({"bad scale", "element 1", [this, scale, width, top] {
                           tensors_.at(scale).bytes[2 * width - 1] = top;
                           tensors_.at(scale).bytes[2 * width - 2] = 0xC0;
                         }});
      }
    }
    add_wrong_dtypes(cases, scale, {DType::kF8E8M0, DType::kF32, DType::kBF16});
    add_wrong_shapes(cases, scale);
    add_wrong_shapes(cases, path + ".weight");
    for (const char* other : {".scale", ".weight_scale", ".weight_scale_inv"}) {
      if (std::string(other) != suffix) add_second_name(cases, scale, path + other);
    }
    expect_faults(path, cases);
  }
}

// Blocks too small beside the largest of w1 and w3 are counted over both, refused, and rounded only where allowed; the
// same from every rank. Blocks of zeros never count.
TEST_F(FormatFaults, InexactMxfp4IsRefusedWithItsCount) {
  write(Layout::kOfficial);
  const std::string stem = "layers.1.ffn.experts.6.", w1 = stem + "w1", w3 = stem + "w3";
  for (const char* matrix : {"w1", "w2", "w3"}) {
    const Shape shape = matrix[1] == '2' ? Shape{64, 32} : Shape{32, 64};
    make_official(tensors_, stem + matrix, shape);
    std::vector<uint8_t>& codes = tensors_.at(stem + matrix + ".weight").bytes;
    std::fill(tensors_.at(stem + matrix + ".scale").bytes.begin(), tensors_.at(stem + matrix + ".scale").bytes.end(),
              120);
    std::fill(codes.begin(), codes.end(), 0x25);
  }
  std::vector<uint8_t>&small = tensors_.at(w1 + ".scale").bytes, &large = tensors_.at(w3 + ".scale").bytes;
  large[11] = 125;
  small[5] = 125 - 17;
  EXPECT_EQ(error(w1), "") << "17 powers fit";
  EXPECT_EQ(open().load_matrix(w1).view.tensor_scale, std::ldexp(1.0f, 125 - 127 - 8)) << "by w3's largest block";
  small[5] = 125 - 18, small[40] = 125 - 30, small[63] = 0;
  std::fill_n(tensors_.at(w1 + ".weight").bytes.begin() + 50 * 16, 16, uint8_t{0x80});
  small[50] = 1;  // zeros
  for (const std::string& name : {w1, w3}) {
    const std::string message = error(name);
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_NE(message.find("found 3 of 128 blocks"), std::string::npos) << message;
    EXPECT_NE(message.find("--allow-inexact"), std::string::npos) << message;
  }
  EXPECT_EQ(error(stem + "w2"), "") << "w2 has a global of its own";
  EXPECT_EQ(error(w1, Inexact::kRound), "");

  WeightSource source = open(Inexact::kRound), other = open(Inexact::kRound, {1, 2}),
               first = open(Inexact::kRefuse, {0, 2});
  const Matrix whole = source.load_matrix(w1), part = other.load_matrix(w1);
  EXPECT_EQ(source.num_rounded_blocks(), 3);
  source.load_matrix(w3);
  EXPECT_EQ(source.num_rounded_blocks(), 3) << "none of w3's";
  EXPECT_EQ(other.num_rounded_blocks(), 3);
  EXPECT_EQ(std::memcmp(whole.data.data(), part.data.data(), whole.data.size()), 0);
  EXPECT_EQ(first.load_matrix(w1).view.rows, 0) << "another rank's expert is not looked at";
  std::vector<float> expected(32 * 64), found(expected.size());
  numeric::q4_dequantize(tensors_.at(w1 + ".weight").bytes.data(), small.data(), 32 * 64, expected.data());
  const double step = std::ldexp(1.0, 125 - 127 - 17);  // the smallest block scale there is
  for (int64_t r = 0; r < 32; ++r) ops::decode_weight_row(whole.view, r, found.data() + r * 64);
  for (size_t i = 0; i < found.size(); ++i) {
    const double error =
        std::fabs(static_cast<double>(found[i] * whole.view.tensor_scale) - static_cast<double>(expected[i]));
    EXPECT_LE(error, small[i / 32] < 125 - 17 ? step / 4 : 0) << i;
  }

  // From the top: load_model refuses, and warns with the count where it may round.
  struct Log final : LogSink {
    void write(LogLevel level, std::string_view message) override {
      if (level == LogLevel::kWarning) warnings += message;
    }
    std::string warnings;
  } log;
  LoadOptions options;
  EXPECT_THROW(testing::load(folder_.path(), ops::InputMode::kF32, ops::CacheMode::kExact), Error);
  options.allow_inexact = true;
  load_model(folder_.path(), options, backends::all_backends(), device::probe_machine(), &log, nullptr);
  EXPECT_NE(log.warnings.find("3 blocks of MXFP4"), std::string::npos) << log.warnings;
}

// A group in which only blocks of zeros have the largest scale; one with nothing but zeros.
TEST_F(FormatFaults, ZeroBlocksDecideNothing) {
  write(Layout::kOfficial);
  const std::string path = "layers.0.ffn.experts.0.w2";
  make_official(tensors_, path, {64, 32});
  std::vector<uint8_t>&codes = tensors_.at(path + ".weight").bytes, &scales = tensors_.at(path + ".scale").bytes;
  std::fill(codes.begin(), codes.end(), uint8_t{0x71});
  std::fill(scales.begin(), scales.end(), uint8_t{100});
  std::fill_n(codes.begin() + 16, 16, uint8_t{0x08});
  scales[1] = 200;
  EXPECT_EQ(open().load_matrix(path).view.tensor_scale, std::ldexp(1.0f, 100 - 127 - 8));
  std::fill(codes.begin(), codes.end(), uint8_t{0x08});
  const Matrix zeros = open().load_matrix(path);
  EXPECT_EQ(zeros.view.tensor_scale, 1.0f);
  EXPECT_EQ(std::count(zeros.scales.as<uint8_t>(), zeros.scales.as<uint8_t>() + zeros.scales.size(), 0), 128);
}

// 256 MiB of codes that are all zero, so that every one is looked at, in a sparse file: memory stays far below.
TEST_F(FormatFaults, ScalesOfLargeMatricesAreFoundInLittleMemory) {
  const Shape shape{16384, 16384};
  const std::string path = folder_.path() + "/large.safetensors";
  const auto entry = [](const std::string& name, const char* dtype, int64_t cols, int64_t begin) {
    const std::string end = std::to_string(begin + 16384 * cols);
    return "\"" + name + R"(": {"dtype": ")" + dtype + R"(", "shape": [16384, )" + std::to_string(cols) +
           R"(], "data_offsets": [)" + std::to_string(begin) + ", " + end + "]}";
  };
  const std::string header = "{" + entry("w1", "I8", 8192, 0) + "," + entry("w3", "I8", 8192, 16384 * 8192) + "," +
                             entry("s1", "F8_E8M0", 512, 2 * 16384 * 8192) + "," +
                             entry("s3", "F8_E8M0", 512, 2 * 16384 * 8192 + 16384 * 512) + "}";
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << header;
  std::filesystem::resize_file(path, 8 + length + 2 * 16384 * (8192 + 512));
  const checkpoint::SafetensorsFile file = checkpoint::SafetensorsFile::open(path);
  StoredTensor w1, w3;
  w1.format = w3.format = StoredFormat::kMxfp4;
  w1.codes = {file.find("w1"), &file}, w1.block_scales = {file.find("s1"), &file};
  w3.codes = {file.find("w3"), &file}, w3.block_scales = {file.find("s3"), &file};
  const StoredTensor* const both[] = {&w1, &w3};

  // The kernel's high-water mark, set back to what is used now.
  const auto peak_kib = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) return std::stol(line.substr(6));
    }
    return -1L;
  };
  if (!(std::ofstream("/proc/self/clear_refs") << "5" << std::flush)) GTEST_SKIP() << "can't reset the peak";
  const long before = peak_kib();
  const Mxfp4Scaling scaling = mxfp4_scaling(both);
  EXPECT_EQ(scaling.num_blocks, 2 * 16384 * 512);
  EXPECT_EQ(scaling.num_unrepresentable, 0);
  MatrixReader reader(nullptr);
  const Matrix part = reader.read(w3, shape, {16000, 16016, 0, 16384}, scaling.global_exponent);
  EXPECT_EQ(part.view.rows, 16);
  EXPECT_LT(peak_kib() - before, 32 << 10);
}

TEST_F(FormatFaults, DraftTensorsAreKnownAndOthersAreSaid) {
  write(Layout::kModelOptMixed);
  {
    WeightSource with_draft = open();
    EXPECT_TRUE(with_draft.kept_aside().empty());
    EXPECT_TRUE(with_draft.unknown().empty());
  }
  int64_t num_draft = 0;
  for (const auto& [name, stored] : tensors_) num_draft += name.starts_with("mtp.0.") ? 1 : 0;
  const Stored any = tensors_.at("norm.weight");
  for (const char* name :
       {"mtp.0.main_proj.weight", "mtp.0.main_proj.scale", "mtp.0.main_norm.weight", "mtp.1.attn.wq_a.weight",
        "mtp.2.ffn.experts.7.w2.scale", "mtp.2.norm.weight", "mtp.2.hc_head_fn", "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.markov_head.markov_w2.weight", "mtp.2.confidence_head.proj.weight"}) {
    tensors_[name] = any;
    ++num_draft;
  }
  tensors_["layers.1.attn.extra.weight"] = any;
  tensors_["vision.proj.weight"] = any;
  testing::write_tensors(folder_.path(), tensors_);
  const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder_.path());
  const WeightSource weights(source, config_, 0, {}, nullptr);
  EXPECT_EQ(static_cast<int64_t>(weights.kept_aside().size()), num_draft);
  EXPECT_EQ(weights.unknown(), (std::vector<std::string>{"layers.1.attn.extra.weight", "vision.proj.weight"}));
  // DSpark stages are not the classic block, whatever the config says.
  const LoadedModel loaded = testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kFp8);
  EXPECT_EQ(loaded.runner->facts().num_draft_layers, 0);
}

TEST_F(FormatFaults, DraftNamesAreMatchedWhole) {
  const DraftNames names(config_);
  for (const char* name :
       {"mtp.0.enorm.weight", "mtp.0.e_proj.weight", "mtp.0.e_proj.scale", "mtp.12.attn.wo_b.weight_scale_inv",
        "mtp.0.ffn.gate.bias", "mtp.0.ffn.gate.weight", "mtp.0.ffn.experts.0.w1.weight_packed", "mtp.1.hc_attn_base",
        "mtp.0.attn.attn_sink", "mtp.0.ffn.shared_experts.w3.weight_scale"})
    EXPECT_TRUE(names.has(name)) << name;
  for (const char* name :
       {"", "mtp", "mtp.", "mtp.0", "mtp.0.", "mtp..enorm.weight", "mtp.x.enorm.weight", "mtp.0.enorm", "mtp.0.e_proj",
        "mtp.0.attn.wq_a.weights", "mtp.0.attn.compressor.wkv.weight", "mtp.0.ffn.gate.tid2eid", "mtp.0.w1.weight",
        "mtp.0.ffn.experts.8.w1.weight", "mtp.0.ffn.experts.0.w4.weight", "xmtp.0.enorm.weight",
        "mtp.2.markov_head.markov_w3.weight", "layers.0.attn_norm.weight", "mtp.-1.enorm.weight"})
    EXPECT_FALSE(names.has(name)) << name;
}

}  // namespace
}  // namespace tessera::model
