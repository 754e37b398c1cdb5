// SPDX-License-Identifier: Apache-2.0
#pragma once
// The routed experts, their activation, and the sum over experts.
//   experts  for each selected expert e of token t, with routing weight w:
//              gate = w1 x, up = w3 x (both rounded when stored), h = silu(min(gate, L)) * clamp(up, -L, L) * w
//              (rounded), out[t][slot] = w2 h (rounded). L = swiglu_limit; 0: no clamp.
//   swiglu   the same activation for the shared expert, which has no routing weight
//   combine  out[t] = sum over slots ascending of routed[t][slot], then + shared[t]; FP32, one rounding
// Slots are in ascending expert id, so the sum has one order. Experts outside [first_expert, first_expert +
// num_local) belong to another rank: their slots are zero.
// Source: DeepSeek-V4 inference/model.py, Expert and MoE.
#include <cstdint>
#include <string>

#include "ops/precision.h"
#include "ops/variant.h"
#include "ops/weight_view.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct MoeExperts {
  static constexpr const char* kName = "moe_experts";
  struct Desc {
    int64_t hidden = 0, inner = 0;
    int64_t first_expert = 0, num_local = 0;
    int64_t num_experts = 0;  // that tokens choose from, on all ranks; 0: the local ones
    int64_t top_k = 0;
    WeightFormat format = WeightFormat::kNvfp4;  // of every expert's three matrices
    InputMode input = InputMode::kA16;           // resolved for `format`
    float swiglu_limit = 0;
    DType activation = DType::kBF16;
    int64_t all_experts() const { return num_experts > 0 ? num_experts : num_local; }
    std::string to_string() const;
  };
  struct Args {
    TensorView x;                      // [tokens, hidden] activation
    const int32_t* experts = nullptr;  // [tokens, top_k] ascending ids
    const float* routing = nullptr;    // [tokens, top_k] weights, not negative
    const WeightView* w1 = nullptr;    // [num_local] of [inner, hidden]: gate
    const WeightView* w3 = nullptr;    // [num_local] of [inner, hidden]: up
    const WeightView* w2 = nullptr;    // [num_local] of [hidden, inner]: down
    TensorView out = {};               // [tokens, top_k, hidden] activation
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

struct SwiGlu {
  static constexpr const char* kName = "swiglu";
  struct Desc {
    int64_t inner = 0;
    float limit = 0;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView gate, up;  // [tokens, inner] activation
    TensorView out;       // [tokens, inner]; may be gate or up
    int64_t num_tokens = 0;
  };
};

struct MoeCombine {
  static constexpr const char* kName = "moe_combine";
  struct Desc {
    int64_t hidden = 0, top_k = 0;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView routed;  // [tokens, top_k, hidden]; data null: routed experts are bypassed
    TensorView shared;  // [tokens, hidden]; data null: the shared expert is bypassed
    TensorView out;     // [tokens, hidden]
    int64_t num_tokens = 0;
  };
};

// silu(gate) * up with the clamp of `limit` (0: none).
float swiglu_value(float gate, float up, float limit);

int64_t moe_experts_reference_workspace(const MoeExperts::Desc& desc, int64_t max_tokens);
bool moe_experts_reference_supports(const MoeExperts::Desc& desc, std::string& why_not);
void moe_experts_reference(const MoeExperts::Desc& desc, const MoeExperts::Args& args, device::Queue& queue);
void swiglu_reference(const SwiGlu::Desc& desc, const SwiGlu::Args& args, device::Queue& queue);
void moe_combine_reference(const MoeCombine::Desc& desc, const MoeCombine::Args& args, device::Queue& queue);

}  // namespace tessera::ops
