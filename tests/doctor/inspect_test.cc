// SPDX-License-Identifier: Apache-2.0
#include "doctor/inspect.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "model/weight_spec.h"
#include "testing/temporary_folder.h"

namespace tessera::doctor {

namespace {

constexpr ops::Precision kServing{ops::InputMode::kA16, ops::CacheMode::kFp8};

TEST(Inspect, BundledModel) {
  const Inspection found = inspect(std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4", kServing);
  EXPECT_TRUE(found.problems.empty());
  EXPECT_EQ(found.num_files, 1u);
  EXPECT_EQ(found.draft, "none");
  const auto part = std::find_if(found.families.begin(), found.families.end(),
                                 [](const FamilyFormat& family) { return family.family == "experts"; });
  ASSERT_NE(part, found.families.end());
  EXPECT_EQ(part->format, "nvfp4");
  EXPECT_EQ(part->num_matrices, 6 * 16 * 3);
  EXPECT_EQ(part->num_values, int64_t{6} * 16 * 3 * 256 * 128);
  // 4.5 bits a value, and one F32 a matrix.
  EXPECT_EQ(part->num_bytes, static_cast<uint64_t>(part->num_values * 9 / 16 + 4 * part->num_matrices));
  uint64_t bytes = 0;
  for (const FamilyFormat& family : found.families) bytes += family.num_bytes;
  EXPECT_EQ(bytes, found.num_bytes) << "every tensor is counted once";
  // Two layers of ratio 4 (584 + 68 bytes an entry) and two of ratio 128.
  EXPECT_DOUBLE_EQ(found.bytes_per_token, 2 * (584 + 68) / 4.0 + 2 * 584 / 128.0);
  EXPECT_EQ(found.contexts.front().max_tokens, 4096);
}

// Ratio 4: an entry of 584 bytes and an index key of 68 (FP4); ratio 128: an entry. Pages may pad, by 2 % at most.
TEST(Inspect, PagesOfPublishedShapesTakeWhatTheirEntriesDo) {
  struct Published {
    int num_window_only, num_pairs,
        num_more;  // layers: window alone; 4, 128 in turn; more of ratio 4 or 128 at the end
    int64_t last_ratio;
    double bytes_per_token;
  };
  for (const auto& [num_window_only, num_pairs, num_more, last_ratio, theory] :
       {Published{2, 20, 1, 4, 3514.25}, Published{0, 30, 1, 128, 5031.4375}}) {
    model::Config config = model::load_config(std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4");
    config.compress_ratios.assign(static_cast<size_t>(num_window_only), 0);
    for (int i = 0; i < num_pairs; ++i) config.compress_ratios.insert(config.compress_ratios.end(), {4, 128});
    config.compress_ratios.insert(config.compress_ratios.end(), static_cast<size_t>(num_more), last_ratio);
    config.num_layers = static_cast<int64_t>(config.compress_ratios.size());
    const model::CacheSpec caches = cache_spec_of(config, kServing);
    const double found = static_cast<double>(caches.page_bytes) / static_cast<double>(caches.page_tokens);
    EXPECT_GE(found, theory);
    EXPECT_LE(found, 1.02 * theory);
    constexpr int64_t kLong = 1 << 20;
    EXPECT_NEAR(static_cast<double>(caches.bytes(kLong) - caches.bytes(0)) / kLong, theory, 0.02 * theory);
  }
}

TEST(Inspect, LongestContextIsTight) {
  model::Config config = model::load_config(std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4");
  config.max_positions = 1 << 20;
  const model::CacheSpec caches = cache_spec_of(config, kServing);
  const uint64_t weights = 1000000;
  for (const uint64_t memory : {2000000u, 9000000u, 77777777u}) {
    const int64_t tokens = max_tokens_in(memory, weights, caches, config.max_positions);
    ASSERT_GT(tokens, 0);
    ASSERT_LT(tokens, config.max_positions);
    EXPECT_LE(weights + static_cast<uint64_t>(caches.bytes(tokens)), memory);
    EXPECT_GT(weights + static_cast<uint64_t>(caches.bytes(tokens + 128)), memory);
  }
  EXPECT_EQ(max_tokens_in(weights, weights, caches, config.max_positions), 0);
}

// A model of Flash's shape in ModelOpt's layout, all headers and no data: sparse files.
class SparseFlash {
 public:
  explicit SparseFlash(const std::string& folder) : folder_(folder) {
    std::string ratios = "0,0";
    for (int i = 0; i < 20; ++i) ratios += ",4,128";
    ratios += ",4";
    std::ofstream(folder + "/config.json")
        << R"({"architectures":["DeepseekV4ForCausalLM"],"model_type":"deepseek_v4","vocab_size":129280,
"hidden_size":4096,"moe_intermediate_size":2048,"num_hidden_layers":43,"num_attention_heads":64,"num_key_value_heads":1,
"head_dim":512,"qk_rope_head_dim":64,"q_lora_rank":1024,"o_groups":8,"o_lora_rank":1024,"n_routed_experts":256,
"n_shared_experts":1,"num_experts_per_tok":6,"num_hash_layers":3,"sliding_window":128,"index_n_heads":64,
"index_head_dim":128,"index_topk":512,"hc_mult":4,"hc_sinkhorn_iters":20,"hc_eps":1e-6,"rms_norm_eps":1e-6,
"swiglu_limit":10.0,"rope_theta":10000,"compress_rope_theta":160000,"rope_scaling":{"type":"yarn","factor":16,
"original_max_position_embeddings":65536,"beta_fast":32,"beta_slow":1},"max_position_embeddings":1048576,
"scoring_func":"sqrtsoftplus","topk_method":"noaux_tc","norm_topk_prob":true,"routed_scaling_factor":1.5,
"tie_word_embeddings":false,"bos_token_id":0,"eos_token_id":1,"num_nextn_predict_layers":0,"compress_ratios":[)"
        << ratios << "]}";
    const model::Config config = model::load_config(folder);
    for (const model::WeightRow& row : model::make_weight_spec(config, 0)) add(row);
    write();
  }

  uint64_t num_bytes() const { return num_bytes_; }
  size_t num_tensors() const { return num_tensors_; }

 private:
  struct Shard {
    std::string header = "{";
    uint64_t bytes = 0;
  };

  void put(const std::string& name, const char* dtype, const Shape& shape, uint64_t bytes) {
    const size_t second = name.find('.', 7);
    Shard& shard = shards_[name.starts_with("layers.") ? name.substr(7, second - 7) : "top"];
    std::string dims;
    for (int i = 0; i < shape.rank(); ++i) dims += fmt::format("{}{}", i > 0 ? "," : "", shape[i]);
    shard.header += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                                shard.bytes > 0 ? "," : "", name, dtype, dims, shard.bytes, shard.bytes + bytes);
    shard.bytes += bytes, num_bytes_ += bytes;
    ++num_tensors_;
  }

  void add(const model::WeightRow& row) {
    const uint64_t count = static_cast<uint64_t>(row.shape.num_elements());
    const bool is_linear = row.kind == model::WeightKind::kLinear;
    if (row.kind == model::WeightKind::kTable) return put(row.name, "I64", row.shape, count * 8);
    if (row.kind == model::WeightKind::kVector) return put(row.name, "F32", row.shape, count * 4);
    if (!is_linear) return put(row.name + ".weight", "BF16", row.shape, count * 2);
    const int64_t rows = row.shape[0], cols = row.shape[1];
    if (row.expert < 0) {
      put(row.name + ".weight", "F8_E4M3", row.shape, count);
      const Shape blocks{(rows + 127) / 128, (cols + 127) / 128};
      return put(row.name + ".scale", "F8_E8M0", blocks, static_cast<uint64_t>(blocks.num_elements()));
    }
    put(row.name + ".weight", "U8", {rows, cols / 2}, count / 2);
    put(row.name + ".weight_scale", "F8_E4M3", {rows, cols / 16}, count / 16);
    put(row.name + ".weight_scale_2", "F32", {}, 4);
    put(row.name + ".input_scale", "F32", {}, 4);
  }

  void write() const {
    for (const auto& [name, shard] : shards_) {
      const std::string path = folder_ + "/model-" + name + ".safetensors", header = shard.header + "}";
      std::ofstream file(path, std::ios::binary);
      for (int i = 0; i < 8; ++i) file.put(static_cast<char>(header.size() >> (8 * i)));
      file << header;
      file.close();
      std::filesystem::resize_file(path, 8 + header.size() + shard.bytes);
    }
  }

  std::string folder_;
  std::map<std::string, Shard> shards_;
  uint64_t num_bytes_ = 0;
  size_t num_tensors_ = 0;
};

TEST(Inspect, HundredGigabytesFromHeadersAlone) {
  const testing::TemporaryFolder folder;
  const SparseFlash flash(folder.path());
  ASSERT_GT(flash.num_bytes(), 100'000'000'000u);
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const Inspection found = inspect(folder.path(), kServing);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_TRUE(found.problems.empty()) << found.problems.front();
  EXPECT_EQ(found.num_bytes, flash.num_bytes());
  EXPECT_EQ(found.num_tensors, flash.num_tensors());
  EXPECT_EQ(found.num_files, 44u);
  EXPECT_EQ(found.what, "DeepSeek-V4 Flash, attention fp8-block, experts nvfp4");
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 512 * 1024) << "KiB of memory for headers";
  // 160 GB of weights: two H200 hold them, one does not, and a million tokens fit beside them.
  const auto h200 =
      std::find_if(found.gpus.begin(), found.gpus.end(), [](const GpuRow& row) { return row.name == "H200"; });
  ASSERT_NE(h200, found.gpus.end());
  EXPECT_EQ(h200->num_gpus, 2);
  EXPECT_EQ(h200->max_tokens, 1048576);
}

}  // namespace

}  // namespace tessera::doctor
