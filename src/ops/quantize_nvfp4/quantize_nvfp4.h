// SPDX-License-Identifier: Apache-2.0
#pragma once
// A matrix in NVFP4 (docs/formats/number_formats.md): codes, a scale per 16 values of a row, and global scales in FP32,
// one per row or one for all. value = code * scale * global. Divisions are IEEE's, roundings to nearest, ties to even:
// the bytes are the same on every machine.
//   kRows         activations: global = amax(row) / 2688; 1 for a row of zeros. In a row that holds NaN or infinity
//                 every block has the scale NaN
//   kTensor       a weight: global = amax / 2688; 1 where that is 0
//   kFourOverSix  a weight: global = amax / 1536, and the largest value of each block becomes 6 or 4, whichever has the
//                 smaller squared error; equal: 6
// In a weight that holds NaN or infinity the global and all scales are NaN.
// Source: numeric/nvfp4.h, and the sources named there.
#include <cstdint>
#include <string>

#include "numeric/nvfp4.h"
#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct QuantizeNvfp4 {
  static constexpr const char* kName = "quantize_nvfp4";
  enum class Rule : uint8_t { kRows, kTensor, kFourOverSix };
  struct Desc {
    Rule rule = Rule::kRows;
    DType dtype = DType::kBF16;  // of x: BF16 or F32
    std::string to_string() const;
  };
  struct Args {
    TensorView x;               // [rows, width], width a multiple of 16; no rows: nothing is written
    uint8_t* codes = nullptr;   // out [rows, width / 2]: E2M1, even column in the low nibble
    uint8_t* scales = nullptr;  // out [rows, width / 16]: E4M3
    float* globals = nullptr;   // out [rows] with kRows, else [1]
  };
};

// How numeric/nvfp4.h names the rule of a weight.
TESSERA_HOST_DEVICE constexpr numeric::Nvfp4WeightRule weight_rule(QuantizeNvfp4::Rule rule) {
  return rule == QuantizeNvfp4::Rule::kTensor ? numeric::Nvfp4WeightRule::kAmax
                                              : numeric::Nvfp4WeightRule::kFourOverSix;
}

// The global scale by the largest magnitude of a row (kRows) or of a weight, which may be NaN or infinite.
TESSERA_HOST_DEVICE constexpr float global_scale(QuantizeNvfp4::Rule rule, float amax) {
  if (rule == QuantizeNvfp4::Rule::kRows && amax == amax) return numeric::nvfp4_activation_scale(amax);
  return numeric::detail::is_finite(amax) ? numeric::nvfp4_weight_scale(amax, weight_rule(rule))
                                          : __builtin_bit_cast(float, 0x7FC00000);  // whatever NaN it was
}

// `count` values (a multiple of 16) of a row by its rule and global scale.
TESSERA_HOST_DEVICE constexpr void quantize_values(QuantizeNvfp4::Rule rule, const float* values, int64_t count,
                                                   float global, uint8_t* codes, uint8_t* scales) {
  // A global scale that is not finite makes the blocks visibly wrong, weights' too.
  if (rule == QuantizeNvfp4::Rule::kRows || global != global) {
    numeric::nvfp4_quantize_row(values, count, global, codes, scales);
  } else {
    numeric::nvfp4_quantize_weight_row(values, count, global, weight_rule(rule), codes, scales);
  }
}

bool quantize_nvfp4_reference_supports(const QuantizeNvfp4::Desc& desc, std::string& why_not);
void quantize_nvfp4_reference(const QuantizeNvfp4::Desc& desc, const QuantizeNvfp4::Args& args, device::Queue& queue);

}  // namespace tessera::ops
