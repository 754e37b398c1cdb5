// SPDX-License-Identifier: Apache-2.0
// Weights: names, formats, slices, packing, and what a damaged checkpoint gets. The checkpoint is T0, rewritten with
// one thing changed at a time.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/rng.h"
#include "base/test_seams.h"
#include "model/model_helpers.h"
#include "model/weight_names.h"
#include "model/weight_source.h"
#include "numeric/bf16.h"
#include "numeric/nvfp4.h"
#include "ops/linear/linear.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/stored_tensors.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

using testing::Stored;
using testing::Tensors;

// Replaces NAME.weight by its NVFP4 form.
void quantise(Tensors& tensors, const std::string& name) {
  Stored& weight = tensors.at(name + ".weight");
  const int64_t rows = weight.shape[0], cols = weight.shape[1];
  const float* values = reinterpret_cast<const float*>(weight.bytes.data());
  const float scale =
      numeric::nvfp4_weight_scale(numeric::abs_max(values, rows * cols), numeric::Nvfp4WeightRule::kAmax);
  Stored codes{DType::kU8, {rows, cols / 2}, std::vector<uint8_t>(static_cast<size_t>(rows * cols / 2))};
  Stored scales{DType::kF8E4M3, {rows, cols / 16}, std::vector<uint8_t>(static_cast<size_t>(rows * cols / 16))};
  for (int64_t r = 0; r < rows; ++r) {
    numeric::nvfp4_quantize_weight_row(values + r * cols, cols, scale, numeric::Nvfp4WeightRule::kAmax,
                                       codes.bytes.data() + r * cols / 2, scales.bytes.data() + r * cols / 16);
  }
  Stored global{DType::kF32, {}, std::vector<uint8_t>(4)};
  std::memcpy(global.bytes.data(), &scale, 4);
  weight = codes;
  tensors[name + ".weight_scale"] = scales;
  tensors[name + ".weight_scale_2"] = global;
}

class WeightsTest : public ::testing::Test {
 protected:
  WeightsTest() {
    testing::write_generated_model(testing::Generated::kT0, folder_.path());
    tensors_ = testing::read_tensors(folder_.path());
    config_ = load_config(folder_.path());
  }
  WeightSource open(Shard shard = {}) {
    testing::write_tensors(folder_.path(), tensors_);
    checkpoints_.push_back(std::make_unique<checkpoint::Checkpoint>(checkpoint::Checkpoint::open(folder_.path())));
    return WeightSource(*checkpoints_.back(), config_, 1, shard, nullptr);
  }
  // The message of loading the whole model; exactly one line that names the folder's file.
  std::string error() {
    testing::write_tensors(folder_.path(), tensors_);
    try {
      testing::load(folder_.path(), ops::InputMode::kF32, ops::CacheMode::kExact);
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_TRUE(error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      return message;
    }
    return "";
  }
  testing::TemporaryFolder folder_;
  Tensors tensors_;
  Config config_;
  std::vector<std::unique_ptr<checkpoint::Checkpoint>> checkpoints_;  // outlive the sources
};

TEST_F(WeightsTest, EveryTensorIsMissedByName) {
  // One of each family.
  for (const char* name : {"embed.weight",
                           "head.weight",
                           "norm.weight",
                           "hc_head_fn",
                           "layers.0.attn_norm.weight",
                           "layers.1.hc_attn_base",
                           "layers.2.hc_ffn_scale",
                           "layers.0.attn.attn_sink",
                           "layers.3.attn.wq_a.weight",
                           "layers.4.attn.wo_a.weight",
                           "layers.1.attn.compressor.ape",
                           "layers.2.attn.compressor.wkv.weight",
                           "layers.3.attn.indexer.wq_b.weight",
                           "layers.3.attn.indexer.weights_proj.weight",
                           "layers.1.attn.indexer.compressor.norm.weight",
                           "layers.0.ffn.gate.tid2eid",
                           "layers.2.ffn.gate.bias",
                           "layers.4.ffn.gate.weight",
                           "layers.0.ffn.experts.7.w3.weight",
                           "layers.0.ffn.shared_experts.w2.weight",
                           "mtp.0.e_proj.weight",
                           "mtp.0.hc_head_base"}) {
    const Stored kept = tensors_.at(name);
    tensors_.erase(name);
    EXPECT_NE(error().find(name), std::string::npos) << name;
    tensors_[name] = kept;
  }
  EXPECT_EQ(error(), "");
}

// A config that leaves parts of the checkpoint out would run, and talk nonsense.
TEST_F(WeightsTest, ConfigsOfFewerPartsAreRefused) {
  const std::string config = testing::generated_config(testing::Generated::kT0);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    const size_t at = config.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return config.substr(0, at) + to + config.substr(at + from.size());
  };
  folder_.write("config.json", replaced("\"num_hidden_layers\": 5", "\"num_hidden_layers\": 2"));
  EXPECT_NE(error().find("config.json: field num_hidden_layers: expected more than"), std::string::npos);
  folder_.write("config.json", replaced("[0, 4, 128, 4, 128, 0]", "[0, 4, 128, 0, 128, 0]"));
  EXPECT_NE(error().find("config.json: field compress_ratios[3]: expected one that uses"), std::string::npos);
}

TEST_F(WeightsTest, WrongDtypesAndShapesAreNamed) {
  for (const char* name :
       {"embed.weight", "norm.weight", "layers.0.hc_attn_fn", "layers.0.attn.attn_sink", "layers.3.attn.wq_a.weight",
        "layers.2.attn.compressor.wkv.weight", "layers.3.attn.indexer.weights_proj.weight", "layers.0.ffn.gate.tid2eid",
        "layers.2.ffn.gate.bias", "layers.0.ffn.experts.7.w3.weight"}) {
    const Stored kept = tensors_.at(name);
    for (const DType dtype : {DType::kI32, DType::kF16, DType::kF64, DType::kI8, DType::kF8E5M2}) {
      if (dtype == DType::kI32 && kept.dtype == DType::kI64) continue;  // legal for the table
      tensors_[name] = {dtype, kept.shape,
                        std::vector<uint8_t>(static_cast<size_t>(kept.shape.num_elements() * dtype_bits(dtype) / 8))};
      EXPECT_NE(error().find(name), std::string::npos) << name << " " << dtype_name(dtype);
    }
    Stored taller = kept;
    std::vector<int64_t> dims;
    for (int i = 0; i < kept.shape.rank(); ++i) dims.push_back(kept.shape[i]);
    dims[0] += 1;
    taller.shape = Shape(dims);
    taller.bytes.resize(static_cast<size_t>(taller.shape.num_elements() * dtype_bits(kept.dtype) / 8));
    tensors_[name] = taller;
    EXPECT_NE(error().find(name), std::string::npos) << name << " taller";
    tensors_[name] = kept;
  }
}

TEST_F(WeightsTest, BadValuesAreNamed) {
  const auto set_float = [&](const char* name, float value) {
    std::memcpy(tensors_.at(name).bytes.data() + 8, &value, 4);
  };
  for (const char* name : {"embed.weight", "head.weight", "layers.0.hc_attn_fn", "layers.3.attn.wq_a.weight",
                           "layers.0.ffn.experts.7.w3.weight", "layers.1.attn.compressor.ape"}) {
    for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      const Stored kept = tensors_.at(name);
      set_float(name, bad);
      const std::string message = error();
      EXPECT_NE(message.find(name), std::string::npos) << message;
      EXPECT_NE(message.find("element 2"), std::string::npos) << message;
      tensors_[name] = kept;
    }
  }
  for (const int64_t bad : {int64_t{-1}, int64_t{8}, int64_t{1} << 40}) {
    const Stored kept = tensors_.at("layers.0.ffn.gate.tid2eid");
    std::memcpy(tensors_.at("layers.0.ffn.gate.tid2eid").bytes.data() + 16, &bad, 8);
    EXPECT_NE(error().find("tid2eid"), std::string::npos);
    tensors_["layers.0.ffn.gate.tid2eid"] = kept;
  }
  std::memcpy(tensors_.at("layers.0.ffn.gate.tid2eid").bytes.data() + 8,
              tensors_.at("layers.0.ffn.gate.tid2eid").bytes.data(), 8);
  EXPECT_NE(error().find("twice"), std::string::npos) << "the same expert twice in a row";
}

TEST_F(WeightsTest, Nvfp4RulesBrokenAlone) {
  const std::string path = "layers.3.attn.wq_a";
  quantise(tensors_, path);
  EXPECT_EQ(error(), "");
  const Tensors good = tensors_;
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"no block scales", [&] { tensors_.erase(path + ".weight_scale"); }},
      {"no tensor scale", [&] { tensors_.erase(path + ".weight_scale_2"); }},
      {"scale shape",
       [&] {
         tensors_[path + ".weight_scale"] = {DType::kF8E4M3, {32, 2}, std::vector<uint8_t>(64, 0x38)};
       }},
      {"scale dtype", [&] { tensors_[path + ".weight_scale"].dtype = DType::kU8; }},
      {"tensor scale dtype",
       [&] {
         tensors_[path + ".weight_scale_2"] = {DType::kF64, {}, std::vector<uint8_t>(8)};
       }},
      {"two tensor scales",
       [&] {
         tensors_[path + ".weight_scale_2"] = {DType::kF32, {2}, std::vector<uint8_t>(8, 1)};
       }},
      {"NaN block scale", [&] { tensors_[path + ".weight_scale"].bytes[5] = 0x7F; }},
      {"negative block scale", [&] { tensors_[path + ".weight_scale"].bytes[5] = 0xB8; }},
      {"zero tensor scale", [&] { tensors_[path + ".weight_scale_2"].bytes.assign(4, 0); }},
      {"NaN tensor scale", [&] { tensors_[path + ".weight_scale_2"].bytes.assign(4, 0xFF); }},
      {"negative tensor scale", [&] { tensors_[path + ".weight_scale_2"].bytes[3] |= 0x80; }},
      {"code width",
       [&] {
         tensors_[path + ".weight"] = {DType::kU8, {32, 64}, std::vector<uint8_t>(2048)};
       }},
      {"MXFP4",
       [&] {
         tensors_.erase(path + ".weight_scale");
         tensors_[path + ".scale"] = {DType::kF8E8M0, {32, 2}, std::vector<uint8_t>(64, 120)};
       }},
      {"compressed-tensors",
       [&] {
         tensors_[path + ".weight_packed"] = tensors_[path + ".weight"];
         tensors_.erase(path + ".weight");
       }},
  };
  for (const auto& [what, change] : cases) {
    tensors_ = good;
    change();
    EXPECT_NE(error().find(path), std::string::npos) << what << ": " << error();
  }
  tensors_ = good;
  tensors_[path + ".input_scale"] = {DType::kF32, {}, {0, 0, 128, 63}};
  EXPECT_EQ(error(), "") << "a static activation scale is allowed";
}

TEST_F(WeightsTest, BitsAreKept) {
  const std::string path = "layers.0.ffn.experts.2.w1";
  quantise(tensors_, path);
  WeightSource source = open();
  const Matrix matrix = source.load_matrix(path);
  EXPECT_EQ(matrix.view.format, ops::WeightFormat::kNvfp4);
  EXPECT_EQ(std::memcmp(matrix.data.data(), tensors_.at(path + ".weight").bytes.data(), matrix.data.size()), 0);
  EXPECT_EQ(std::memcmp(matrix.scales.data(), tensors_.at(path + ".weight_scale").bytes.data(), matrix.scales.size()),
            0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(matrix.data.data()) % 128, 0u);
}

// The same numbers under Hugging Face names, experts one by one and fused, give the same logits bit for bit.
TEST_F(WeightsTest, HuggingFaceNamesGiveTheSameModel) {
  const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 40);
  const auto logits = [&] {
    testing::write_tensors(folder_.path(), tensors_);
    const auto loaded = testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kFp8);
    const auto state = loaded.runner->new_sequence(40);
    return testing::feed(*loaded.runner, *state, ids, LogitRows::kAll);
  };
  const std::vector<float> expected = logits();
  Tensors renamed;
  for (const auto& [name, stored] : tensors_) {
    if (name.starts_with("mtp.")) continue;
    const bool is_weight = name.ends_with(".weight") && hf_name(name).empty();
    const std::string base = is_weight ? name.substr(0, name.size() - 7) : name;
    const std::string hf = hf_name(base);
    ASSERT_FALSE(hf.empty()) << name;
    renamed[hf + (is_weight ? ".weight" : "")] = stored;
  }
  tensors_ = renamed;
  EXPECT_TRUE(testing::same_bits(logits(), expected)) << "experts one by one";
  for (int layer = 0; layer < 5; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.experts.";
    Stored gate_up{DType::kF32, {8, 64, 64}, {}}, down{DType::kF32, {8, 64, 32}, {}};
    for (int e = 0; e < 8; ++e) {
      for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
        const std::string name = prefix + std::to_string(e) + "." + matrix + ".weight";
        Stored& target = std::string(matrix) == "down_proj" ? down : gate_up;
        target.bytes.insert(target.bytes.end(), tensors_.at(name).bytes.begin(), tensors_.at(name).bytes.end());
        tensors_.erase(name);
      }
    }
    tensors_[prefix + "gate_up_proj"] = gate_up;
    tensors_[prefix + "down_proj"] = down;
  }
  EXPECT_TRUE(testing::same_bits(logits(), expected)) << "experts fused";
}

TEST(WeightNames, AreMatchedWhole) {
  EXPECT_EQ(hf_name("layers.12.attn.wq_a"), "model.layers.12.self_attn.q_a_proj");
  EXPECT_EQ(hf_name("layers.0.ffn.experts.255.w2"), "model.layers.0.mlp.experts.255.down_proj");
  EXPECT_EQ(hf_fused_expert("layers.3.ffn.experts.5.w3").tensor, "model.layers.3.mlp.experts.gate_up_proj");
  EXPECT_EQ(hf_fused_expert("layers.3.ffn.experts.5.w3").part, 1);
  for (const char* other : {"mtp.2.markov_head.markov_w1", "layers.x.attn.wq_a", "layers.1.attn.wq_aa", "layers.1",
                            "layers.1.", "", "xlayers.1.attn.wq_a"})
    EXPECT_EQ(hf_name(other), "") << other;
  EXPECT_TRUE(hf_fused_expert("layers.3.ffn.shared_experts.w1").tensor.empty());
}

// Slices of two ranks put together are the whole, for every rule.
TEST_F(WeightsTest, SlicesOfRanksMakeTheWhole) {
  // o_lora_rank 32, so that a rank's columns of wo_b are whole NVFP4 groups.
  for (const char* name : {"layers.2.attn.wq_b", "layers.2.attn.wo_a", "layers.2.attn.wo_b",
                           "layers.2.ffn.experts.1.w1", "layers.2.ffn.experts.6.w1"}) {
    quantise(tensors_, name);
    WeightSource whole = open(), first = open({0, 2}), second = open({1, 2});
    const auto values = [](const Matrix& matrix) {
      std::vector<float> out(static_cast<size_t>(matrix.view.rows * matrix.view.cols));
      for (int64_t r = 0; r < matrix.view.rows; ++r)
        ops::decode_weight_row(matrix.view, r, out.data() + r * matrix.view.cols);
      return out;
    };
    const Matrix all = whole.load_matrix(name), a = first.load_matrix(name), b = second.load_matrix(name);
    std::vector<float> joined;
    const std::vector<float> va = values(a), vb = values(b);
    if (a.view.cols < all.view.cols) {
      for (int64_t r = 0; r < all.view.rows; ++r) {
        joined.insert(joined.end(), va.begin() + r * a.view.cols, va.begin() + (r + 1) * a.view.cols);
        joined.insert(joined.end(), vb.begin() + r * b.view.cols, vb.begin() + (r + 1) * b.view.cols);
      }
    } else {
      joined = va;
      joined.insert(joined.end(), vb.begin(), vb.end());
    }
    // An expert belongs to one rank whole.
    const bool is_expert = std::string(name).find("experts") != std::string::npos;
    EXPECT_EQ(is_expert ? std::min(a.view.rows, b.view.rows) : 2 * a.view.rows * a.view.cols,
              is_expert ? 0 : all.view.rows * all.view.cols)
        << name;
    EXPECT_TRUE(testing::same_bits(joined, values(all))) << name;
  }
  WeightSource second = open({1, 2});
  EXPECT_EQ(second.load_vector("layers.2.attn.attn_sink").view().shape, (Shape{2}));
  EXPECT_THROW(open({0, 3}), Error) << "three ranks do not divide";
}

// A layout that reverses the bytes: packing is asked from the variant, keeps every bit, and unpacks.
TEST_F(WeightsTest, PackedLayoutsAreAskedAndLossless) {
  static constexpr auto reverse = [](const ops::WeightView& from, const ops::WeightView& to, device::Queue&) {
    const auto flip = [](const void* source, void* target, int64_t bytes) {
      std::reverse_copy(static_cast<const char*>(source), static_cast<const char*>(source) + bytes,
                        static_cast<char*>(target));
    };
    flip(from.data, const_cast<void*>(to.data), from.data_bytes());
    flip(from.block_scales, const_cast<void*>(to.block_scales), from.scale_bytes());
  };
  static constexpr ops::PackedLayout layout{"reversed", [](const ops::WeightView& w) { return w.data_bytes(); },
                                            [](const ops::WeightView& w) { return w.scale_bytes(); }, reverse, reverse};
  const std::string path = "layers.0.attn.wkv";
  quantise(tensors_, path);
  WeightSource source = open();
  const Matrix plain = source.load_matrix(path), packed = source.load_matrix(path, &layout);
  EXPECT_NE(std::memcmp(packed.data.data(), plain.data.data(), plain.data.size()), 0);
  Matrix back = source.load_matrix(path);
  std::memset(back.data.data(), 0, back.data.size());
  device::Queue queue;
  layout.unpack(packed.view, back.view, queue);
  EXPECT_EQ(std::memcmp(back.data.data(), plain.data.data(), plain.data.size()), 0);
  EXPECT_EQ(std::memcmp(back.scales.data(), plain.scales.data(), plain.scales.size()), 0);
}

TEST_F(WeightsTest, TooLittleMemoryIsSaidBeforeReading) {
  testing::write_tensors(folder_.path(), tensors_);
  device::Machine machine = device::probe_machine();
  machine.memory_available_bytes = 1 << 20;
  try {
    load_model(folder_.path(), {}, {}, machine, nullptr, nullptr);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_NE(std::string(error.what()).find("missing"), std::string::npos);
  }
}

#ifdef TESSERA_TEST_SEAMS
// Every file call of a load fails once: an error each time, never a crash, and loading works afterwards.
TEST_F(WeightsTest, AnyFailingFileCallIsAnError) {
  testing::write_tensors(folder_.path(), tensors_);
  const auto load = [&] { return testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kFp8); };
  seams::fail_file_call(0);
  load();
  const int64_t total = seams::num_file_calls();
  for (int64_t nth = 1; nth <= total; nth += 1 + total / 60) {
    seams::fail_file_call(nth);
    EXPECT_THROW(load(), Error) << nth << " of " << total;
    seams::fail_file_call(0);
  }
  EXPECT_NO_THROW(load());
}

// The same for allocations.
TEST_F(WeightsTest, AnyFailingAllocationIsAnError) {
  testing::write_tensors(folder_.path(), tensors_);
  const auto load = [&] { return testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kFp8, 1); };
  seams::fail_allocation(0);
  load();
  const int64_t total = seams::num_allocations();
  for (int64_t nth = 1; nth <= total; nth += 1 + total / 60) {
    seams::fail_allocation(nth);
    bool has_failed = false;
    try {
      load();
    } catch (const std::bad_alloc&) {
      has_failed = true;
    } catch (const Error&) {
      has_failed = true;  // a failed allocation inside a message or a library call that reports it
    }
    seams::fail_allocation(0);
    EXPECT_TRUE(has_failed) << nth << " of " << total;
  }
  EXPECT_NO_THROW(load());
}
#endif

}  // namespace
}  // namespace tessera::model
