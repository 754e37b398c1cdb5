// SPDX-License-Identifier: Apache-2.0
#include "testing/generated_model.h"

#include <cmath>
#include <fstream>

#include "base/json.h"
#include "checkpoint/safetensors_writer.h"
#include "device/buffer.h"
#include "model/config.h"
#include "model/weight_spec.h"

namespace tessera::testing {

namespace {

bool ends_with(const std::string& name, const char* suffix) {
  return name.ends_with(suffix);
}

// splitmix64 of (FNV-1a of the name, index), the top byte as -128 .. 127.
int generated_byte(uint64_t seed, int64_t index) {
  uint64_t z = seed + static_cast<uint64_t>(index + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  z ^= z >> 31;
  return static_cast<int>(z >> 56) - 128;
}

double generated_value(const std::string& name, const Shape& shape, int k) {
  const bool is_matrix = shape.rank() == 2;
  const double quarter = std::floor(k / 4.0);
  if (ends_with(name, "_fn") || (ends_with(name, ".weight") && is_matrix && name != "embed.weight")) {
    const double columns = static_cast<double>(shape[shape.rank() - 1]);
    return k / 128.0 * std::pow(2.0, -std::floor(0.5 * std::log2(columns / 3) + 0.5));
  }
  if (ends_with(name, ".weight") && !is_matrix) return 1 + quarter / 128;
  if (ends_with(name, ".bias")) return k / 1024.0;
  if (ends_with(name, "_scale")) return 0.5 + quarter / 128;
  if (ends_with(name, "ape") || ends_with(name, "_base")) return k / 256.0;
  return k / 128.0;  // embed.weight, attn_sink
}

model::Config config_of(Generated which) {
  return model::parse_config(Json::parse(generated_config(which), "config"), "config");
}

}  // namespace

std::string generated_config(Generated which) {
  const bool is_t0 = which == Generated::kT0;
  const auto pick = [&](int t0, int t1) { return std::to_string(is_t0 ? t0 : t1); };
  return R"({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1,
 "num_hidden_layers": 5, "qk_rope_head_dim": 64, "o_groups": 2, "compress_ratios": [0, 4, 128, 4, 128, 0],
 "index_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_hash_layers": 2,
 "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5,
 "swiglu_limit": 1.5, "hidden_act": "silu", "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
 "rms_norm_eps": 1e-06, "rope_theta": 10000, "compress_rope_theta": 160000,
 "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                  "original_max_position_embeddings": 65536},
 "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1, "tie_word_embeddings": false,
 "attention_bias": false, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32", "vocab_size": )" +
         pick(64, 512) + ", \"hidden_size\": " + pick(64, 256) + ", \"num_attention_heads\": " + pick(4, 8) +
         ", \"head_dim\": " + pick(128, 512) + ", \"q_lora_rank\": " + pick(32, 128) +
         ", \"o_lora_rank\": " + pick(32, 128) + ", \"moe_intermediate_size\": " + pick(32, 128) +
         ", \"num_experts_per_tok\": " + pick(2, 3) + ", \"index_n_heads\": " + pick(16, 64) +
         ", \"index_topk\": " + pick(4, 8) + ", \"sliding_window\": " + pick(16, 128) + "}";
}

std::string smallest_config() {
  return R"({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1,
 "num_hidden_layers": 2, "qk_rope_head_dim": 16, "o_groups": 1, "compress_ratios": [4, 128],
 "index_head_dim": 16, "n_routed_experts": 2, "n_shared_experts": 1, "num_hash_layers": 1,
 "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5,
 "swiglu_limit": 1.5, "hidden_act": "silu", "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
 "rms_norm_eps": 1e-06, "rope_theta": 10000, "compress_rope_theta": 160000,
 "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                  "original_max_position_embeddings": 65536},
 "max_position_embeddings": 4096, "num_nextn_predict_layers": 1, "tie_word_embeddings": false,
 "attention_bias": false, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32", "vocab_size": 64,
 "hidden_size": 16, "num_attention_heads": 1, "head_dim": 32, "q_lora_rank": 16, "o_lora_rank": 16,
 "moe_intermediate_size": 16, "num_experts_per_tok": 1, "index_n_heads": 1, "index_topk": 4,
 "sliding_window": 8})";
}

void write_generated_model(Generated which, const std::string& folder) {
  write_generated_model(generated_config(which), folder);
}

void write_generated_model(const std::string& config_text, const std::string& folder) {
  std::ofstream(folder + "/config.json") << config_text;
  const model::Config config = model::parse_config(Json::parse(config_text, "config"), "config");
  std::vector<device::Tensor> tensors;
  std::vector<std::pair<std::string, TensorView>> named;
  for (const model::WeightRow& row : model::make_weight_spec(config, 1)) {
    const bool is_map = row.kind == model::WeightKind::kLinear || row.kind == model::WeightKind::kPlain;
    const std::string name = row.name + (is_map ? ".weight" : "");
    const int64_t count = row.shape.num_elements();
    if (row.kind == model::WeightKind::kTable) {
      tensors.emplace_back(DType::kI64, row.shape);
      for (int64_t i = 0; i < count; ++i) {
        tensors.back().as<int64_t>()[i] = (7 * (i / row.shape[1]) + 3 * (i % row.shape[1])) % config.num_experts;
      }
    } else {
      uint64_t seed = 0xCBF29CE484222325;
      for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001B3;
      tensors.emplace_back(DType::kF32, row.shape);
      for (int64_t i = 0; i < count; ++i) {
        tensors.back().as<float>()[i] = static_cast<float>(generated_value(name, row.shape, generated_byte(seed, i)));
      }
    }
    named.emplace_back(name, tensors.back().view());
  }
  checkpoint::write_safetensors(folder + "/model.safetensors", named);
}

std::vector<int32_t> generated_ids(Generated which, int64_t count) {
  const int64_t vocab = config_of(which).vocab_size;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < count; ++t) ids.push_back(static_cast<int32_t>((3 * t * t + 7 * t + 5) % vocab));
  return ids;
}

}  // namespace tessera::testing
