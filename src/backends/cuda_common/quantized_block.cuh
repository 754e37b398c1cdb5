// SPDX-License-Identifier: Apache-2.0
#pragma once
// A block of 16 NVFP4 activations (docs/contracts/numerics.md, section 3) by Blackwell's conversion to E2M1
// (ptx/conversions.cuh), with the bits of numeric::nvfp4_quantize_row: that divides by IEEE's rules, here a product
// with the step's reciprocal, a little too small and a little too large, gives the same code nearly always. Where the
// two do not agree, a quotient may lie between: then it is divided.
#include <cstdint>

#include "backends/cuda_common/ptx/conversions.cuh"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

struct QuantizedBlock {
  uint64_t codes = 0;
  uint8_t scale = 0;
};

// `amax` is the largest magnitude, NaN where one of the values is; g is the row's.
__device__ inline QuantizedBlock quantize_block(const float (&values)[numeric::kNvfp4Block], float amax, float g) {
  QuantizedBlock block;
  if (!numeric::detail::is_finite(amax) || !numeric::detail::is_finite(g)) {
    block.scale = numeric::kE4m3Nan;
    if (!numeric::detail::is_finite(g)) block.codes = 0x7777777777777777;  // what a quotient that is NaN gives
    return block;
  }
  if (g == 0) return block;
  block.scale = ptx::e4m3_code(amax / (numeric::kE2m1Max * g));
  const float step = numeric::e4m3_to_float(block.scale) * g;
  if (step == 0 || block.scale == numeric::kE4m3Nan) return block;
  // With eight times the error of both roundings between; beyond this range a reciprocal or a product would have more.
  constexpr float kMargin = 0x1p-20f, kLeast = 0x1p-100f, kMost = 0x1p100f;
  const float inverse = 1 / step, below = inverse * (1 - kMargin), above = inverse * (1 + kMargin);
  uint32_t words[2];
  bool is_certain = step >= kLeast && step <= kMost;
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    float least[8], most[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) least[i] = values[8 * word + i] * below, most[i] = values[8 * word + i] * above;
    words[word] = ptx::e2m1_codes(least);
    is_certain = is_certain && ptx::e2m1_codes(most) == words[word];
  }
  if (!is_certain) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      float quotients[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) quotients[i] = values[8 * word + i] / step;
      words[word] = ptx::e2m1_codes(quotients);
    }
  }
  block.codes = words[0] | static_cast<uint64_t>(words[1]) << 32;
  return block;
}

}  // namespace tessera::backends::cuda_common
