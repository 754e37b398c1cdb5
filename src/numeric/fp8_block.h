// SPDX-License-Identifier: Apache-2.0
#pragma once
// Q8: E4M3 codes with one power-of-two scale (UE8M0) per group of a row, for caches and `a8` activations; and FP8
// weights with one FP32 factor per 128 x 128 block.
// Source: DeepSeek-V4 inference/kernel.py, act_quant with scale_fmt "ue8m0"; weight_block_size of config.json.
#include <bit>
#include <cstdint>

#include "base/host_device.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "numeric/nvfp4.h"

namespace tessera::numeric {

constexpr int kFp8WeightBlock = 128;

// The scale of a group of largest magnitude `amax`: 2^ceil(log2(max(amax, 1e-4) / 448)); NaN (0xFF) where amax is NaN
// or infinite.
TESSERA_HOST_DEVICE constexpr uint8_t q8_scale(float amax) {
  return detail::is_finite(amax) ? e8m0_from_float_up((amax > 1e-4f ? amax : 1e-4f) * (1.0f / 448.0f)) : kE8m0Nan;
}

// The code of a value under that scale; 0 where it is NaN.
TESSERA_HOST_DEVICE constexpr uint8_t q8_code(float value, uint8_t scale) {
  return scale == kE8m0Nan ? uint8_t{0} : e4m3_from_float(value / e8m0_to_float(scale));
}

// Per group of x its scale, and the codes. The last group may be partial.
TESSERA_HOST_DEVICE constexpr void q8_quantize(const float* x, int64_t count, int64_t group, uint8_t* codes,
                                               uint8_t* scales) {
  for (int64_t begin = 0, g = 0; begin < count; begin += group, ++g) {
    const int64_t size = count - begin < group ? count - begin : group;
    scales[g] = q8_scale(abs_max(x + begin, size));
    for (int64_t i = 0; i < size; ++i) codes[begin + i] = q8_code(x[begin + i], scales[g]);
  }
}

// code * scale: exact in FP32 and BF16.
TESSERA_HOST_DEVICE constexpr void q8_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t count,
                                                 int64_t group, float* out) {
  for (int64_t begin = 0, g = 0; begin < count; begin += group, ++g) {
    const int64_t size = count - begin < group ? count - begin : group;
    const float scale = e8m0_to_float(scales[g]);
    for (int64_t i = 0; i < size; ++i) {
#ifdef __CUDA_ARCH__
      out[begin + i] = e4m3_to_float(codes[begin + i]) * scale;
#else
      out[begin + i] = kE4m3Values[codes[begin + i]] * scale;
#endif
    }
  }
}

// Whether an FP8 weight's scale can be multiplied with each code before sums, exactly in BF16: 0, or a power of two
// from 2^-100 to 2^7. The largest is that whose product with 2^120 BF16 holds (cuda_common/packed_units.h); below the
// least no checkpoint's is near.
constexpr bool fp8_scale_folds(float scale) {
  const auto bits = std::bit_cast<uint32_t>(scale), exponent = bits >> 23;  // 256 and more: negative
  return bits == 0 || (bits << 9 == 0 && exponent >= 127 - 100 && exponent <= 127 + 7);
}

// One row of an FP8 weight; `row_scales` holds one factor per 128 columns (those of the row's block row).
TESSERA_HOST_DEVICE constexpr void fp8_block_dequantize_row(const uint8_t* codes, const float* row_scales,
                                                            int64_t count, float* out) {
  for (int64_t k = 0; k < count; ++k) {
#ifdef __CUDA_ARCH__
    out[k] = e4m3_to_float(codes[k]) * row_scales[k / kFp8WeightBlock];
#else
    out[k] = kE4m3Values[codes[k]] * row_scales[k / kFp8WeightBlock];
#endif
  }
}

}  // namespace tessera::numeric
