// SPDX-License-Identifier: Apache-2.0
#pragma once
// y[t][g * n + i] = factor * sum_k x[t][g * k + kk] * W[g * n + i][kk]: a linear map, block-diagonal over `groups`
// (1 for all but the output projection's first half). The weight keeps the checkpoint's bits.
//   f32, a16  x as stored. NVFP4: code * block scale is exact (6 significant bits), FP32 sums, factor = tensor scale.
//   a8        x is replaced by its E4M3-by-128 rounding (power-of-two scales), then as a16.
//   a4        x is replaced by code * block scale of its NVFP4 rounding; factor = tensor scale * g of the row.
// Rounding: FP32 sums in the order of ops/reference_rows.h `dot`; one rounding when y is stored.
// Source: docs/contracts/numerics.md, sections 2 and 3.
#include <cstdint>
#include <string>

#include "ops/precision.h"
#include "ops/variant.h"
#include "ops/weight_view.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

constexpr int64_t kMaxLinearIn = 32768;

struct Linear {
  static constexpr const char* kName = "linear";
  struct Desc {
    int64_t in = 0, out = 0;  // of one group
    int64_t groups = 1;
    WeightFormat format = WeightFormat::kBf16;
    InputMode input = InputMode::kA16;  // already resolved for this weight: a4 only with NVFP4
    DType activation = DType::kBF16;    // of x
    DType output = DType::kBF16;        // of y: activation, or kF32
    std::string to_string() const;
  };
  struct Args {
    TensorView x = {};  // [tokens, groups * in]
    WeightView weight;  // [groups * out, in]
    TensorView y = {};  // [tokens, groups * out]
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

int64_t linear_reference_workspace(const Linear::Desc& desc, int64_t max_tokens);
bool linear_reference_supports(const Linear::Desc& desc, std::string& why_not);
void linear_reference(const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue);

// What the references of `linear` and `moe_experts` share -------------------------------------------------------

// Replaces a row of `width` values by what the multiply sees in `mode`; returns the factor of the row's sums.
// `bound` > 0 gives g from the clamp bound of w2's input (docs/contracts/numerics.md, section 3); 0: g = amax / 2688.
float prepare_input_row(InputMode mode, float* row, int64_t width, float bound);
// Row `n` of a weight as FP32, without the tensor scale.
void decode_weight_row(const WeightView& weight, int64_t row, float* out);

}  // namespace tessera::ops
