// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which experts a token goes to, and with what weights:
//   s_e = sqrt(softplus(logit_e)); learned: the top_k largest s_e + bias_e (ties: the lower id); hashed: the table's
//   row of the token id. weight_e = s_e / (sum of s over the selected + 1e-20) * scaling; the bias never enters
//   weights.
// Output ids ascend. FP32 throughout. NaN scores are never selected before others.
// Source: DeepSeek-V4 inference/model.py, Gate.forward; the 1e-20 guards 0/0 when every score underflows.
#include <cstdint>
#include <string>

#include "ops/variant.h"

namespace tessera::ops {

struct Router {
  static constexpr const char* kName = "router";
  struct Desc {
    int64_t num_experts = 0, top_k = 0;
    bool is_hashed = false;
    bool is_normalized = true;  // norm_topk_prob
    float scaling = 1;          // routed_scaling_factor
    std::string to_string() const;
  };
  struct Args {
    const float* logits = nullptr;       // [tokens, num_experts]
    const float* bias = nullptr;         // [num_experts], learned only
    const int32_t* table = nullptr;      // [vocab, top_k], hashed only; distinct ids in [0, num_experts) per row
    const int32_t* token_ids = nullptr;  // [tokens], hashed only; below 0, where none was drawn: as 0
    int32_t* experts = nullptr;          // out [tokens, top_k]
    float* weights = nullptr;            // out [tokens, top_k]
    int64_t num_tokens = 0;
  };
};

// max(x, 0) + log1p(exp(-|x|)), then the square root.
float sqrt_softplus(float x);

// The top_k largest scores of the `count` experts `among` (ascending ids; null: 0 to count - 1), best first.
void select_experts(const float* logits, const float* bias, const int32_t* among, int64_t count, int64_t top_k,
                    int32_t* selected);
// A token's chosen experts in ascending order, and their weights.
void weigh_experts(const Router::Desc& desc, const float* logits, int32_t* experts, float* weights);

void router_reference(const Router::Desc& desc, const Router::Args& args, device::Queue& queue);

}  // namespace tessera::ops
