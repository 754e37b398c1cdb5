// SPDX-License-Identifier: Apache-2.0
#pragma once
// The facts of a DeepSeek-V4 model, validated once from config.json: Flash, Pro and any smaller shape. Both spellings
// are read: the official one (compress_ratios, num_hash_layers, qk_rope_head_dim, rope_scaling) and that of Hugging
// Face transformers (layer_types, mlp_layer_types, partial_rotary_factor, rope_parameters).
// Source: config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro; transformers configuration_deepseek_v4.py.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "ops/rope/rope.h"

namespace tessera::model {

struct Config {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_dim = 0;  // the last values of a head
  int64_t q_lora_rank = 0;
  int64_t o_groups = 0;
  int64_t o_lora_rank = 0;               // per group
  int64_t sliding_window = 0;            // includes the current token
  std::vector<int64_t> compress_ratios;  // per main layer: 0 (window only), 4 (CSA) or 128 (HCA)
  int64_t index_num_heads = 0, index_head_dim = 0, index_topk = 0;  // 0 where no layer has an indexer
  int64_t num_experts = 0, experts_per_token = 0, expert_inner = 0;
  int64_t num_hash_layers = 0;  // the first layers route by token id
  double routed_scaling_factor = 1;
  double swiglu_limit = 0;  // 0: no clamp
  bool norm_topk_prob = true;
  int64_t hc_sinkhorn_iters = 20;
  double hc_eps = 1e-6, rms_norm_eps = 1e-6;
  double rope_theta = 0;           // layers of ratio 0 and draft blocks
  double compress_rope_theta = 0;  // all others, with yarn
  ops::Yarn yarn;
  int64_t max_positions = 0;
  int64_t num_mtp_layers = 0;  // as the file says; which draft tensors there are, the checkpoint decides
  bool has_dspark = false;     // the draft tensors are DSpark stages
  int64_t bos_id = 0;
  std::vector<int64_t> eos_ids;

  int64_t nope_dim() const { return head_dim - rope_dim; }
  int64_t heads_per_group() const { return num_heads / o_groups; }
  int64_t group_width() const { return heads_per_group() * head_dim; }
  bool is_hashed(int64_t layer) const { return layer < num_hash_layers; }
  // Differs where any fact differs that outputs depend on.
  uint64_t fingerprint() const;
};

// Throws kDataLoss naming file and field, kUnsupported for another model or a setting that this program has not got.
Config parse_config(const Json& root, const std::string& file);
// DIRECTORY/config.json.
Config load_config(const std::string& directory);

}  // namespace tessera::model
