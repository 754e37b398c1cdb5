// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4: value = code * block_scale * tensor_scale. E2M1 codes, two per byte (even element low); one E4M3 scale per 16
// consecutive values of a row; one FP32 scale per tensor (weights) or row (activations).
// Source: NVIDIA Model Optimizer's NVFP4 format; four-over-six: arXiv 2512.02010.
#include <cstdint>

#include "base/host_device.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"

namespace tessera::numeric {

constexpr int kNvfp4Block = 16;

// Tensor scale of a row of activations by its largest magnitude; 1 for an all-zero row.
TESSERA_HOST_DEVICE constexpr float nvfp4_activation_scale(float amax) {
  return amax == 0 ? 1.0f : amax / (kE2m1Max * kE4m3Max);
}

// The same by the bound that SwiGLU's clamp puts on w2's input: |silu(gate) * up * w| < w * limit^2.
TESSERA_HOST_DEVICE constexpr float nvfp4_bounded_activation_scale(float routing_weight, float swiglu_limit) {
  return routing_weight * swiglu_limit * swiglu_limit / (kE2m1Max * kE4m3Max);
}

// Largest magnitude of `count` values; NaN where one of them is NaN.
TESSERA_HOST_DEVICE constexpr float abs_max(const float* x, int64_t count) {
  float max = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    if (magnitude != magnitude) return magnitude;
    max = magnitude > max ? magnitude : max;
  }
  return max;
}

namespace detail {

// Codes of one block with a given scale byte. A zero scale gives zero codes.
TESSERA_HOST_DEVICE constexpr void nvfp4_encode_block(const float* x, uint8_t scale, float tensor_scale,
                                                      uint8_t* codes) {
  const float step = e4m3_to_float(scale) * tensor_scale;
  for (int i = 0; i < kNvfp4Block; i += 2) {
    const uint8_t low = step == 0 ? 0 : e2m1_from_float(x[i] / step);
    const uint8_t high = step == 0 ? 0 : e2m1_from_float(x[i + 1] / step);
    codes[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

TESSERA_HOST_DEVICE constexpr bool is_finite(float value) {
  return value - value == 0;
}

}  // namespace detail

// The scale of 16 activations of largest magnitude `amax` in a row with tensor scale `g`: E4M3(amax / (6 g)), IEEE
// division. E2M1 has no NaN, so a block that holds a NaN or an infinity gets scale NaN (0x7F): whatever is multiplied
// by it stays visibly wrong. The same where g is not finite. g is 0 for a row too small to scale (its 2688th part
// underflows) and for routing weight 0: a row of zeros.
TESSERA_HOST_DEVICE constexpr uint8_t nvfp4_activation_block_scale(float amax, float g) {
  if (!detail::is_finite(amax) || !detail::is_finite(g)) return kE4m3Nan;
  return g == 0 ? uint8_t{0} : e4m3_from_float(amax / (kE2m1Max * g));
}

// A row of `count` (a multiple of 16) activations with tensor scale `g`: scales as above, codes = E2M1(x / (scale *
// g)), nearest even, IEEE division.
TESSERA_HOST_DEVICE constexpr void nvfp4_quantize_row(const float* x, int64_t count, float g, uint8_t* codes,
                                                      uint8_t* scales) {
  for (int64_t block = 0; block < count / kNvfp4Block; ++block) {
    const float* values = x + block * kNvfp4Block;
    const uint8_t scale = nvfp4_activation_block_scale(abs_max(values, kNvfp4Block), g);
    scales[block] = scale;
    detail::nvfp4_encode_block(values, scale == kE4m3Nan ? 0 : scale, g, codes + block * (kNvfp4Block / 2));
  }
}

// A value as it reads back from its code, times its block's scale.
TESSERA_HOST_DEVICE constexpr float nvfp4_rounded_activation(float x, uint8_t scale, float g) {
  const float step = e4m3_to_float(scale) * g;
  if (scale == kE4m3Nan) return step;
  return step == 0 ? 0 : e2m1_to_float(e2m1_from_float(x / step)) * e4m3_to_float(scale);
}

// code * block scale, without the tensor scale: exact in FP32 and in BF16 (at most six significant bits).
TESSERA_HOST_DEVICE constexpr void nvfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t count,
                                                        float* out) {
  for (int64_t block = 0; block < count / kNvfp4Block; ++block) {
#ifdef __CUDA_ARCH__
    const float scale = e4m3_to_float(scales[block]);
#else
    const float scale = kE4m3Values[scales[block]];
#endif
    for (int i = 0; i < kNvfp4Block / 2; ++i) {
      const uint8_t byte = codes[block * (kNvfp4Block / 2) + i];
#ifdef __CUDA_ARCH__
      const E2m1Pair pair{e2m1_to_float(byte & 15), e2m1_to_float(byte >> 4)};
#else
      const E2m1Pair& pair = kE2m1Pairs[byte];
#endif
      out[block * kNvfp4Block + 2 * i] = pair.low * scale;
      out[block * kNvfp4Block + 2 * i + 1] = pair.high * scale;
    }
  }
}

enum class Nvfp4WeightRule : uint8_t {
  kAmax,         // the block's largest value becomes 6
  kFourOverSix,  // 6 or 4, whichever gives the smaller squared error; equal: 6
};

// Tensor scale of a weight by its largest magnitude; 1 where that is 0, not finite, or so small that the scale would be
// 0 (a stored tensor scale is above 0; the codes are zeros then).
TESSERA_HOST_DEVICE constexpr float nvfp4_weight_scale(float amax, Nvfp4WeightRule rule) {
  if (amax == 0 || !detail::is_finite(amax)) return 1;
  // Four-over-six needs room for a block scale 1.5 times larger: 1.5 * 256 = 384 <= 448.
  const float scale = amax / (kE2m1Max * (rule == Nvfp4WeightRule::kAmax ? kE4m3Max : 256.0f));
  return scale == 0 ? 1 : scale;
}

// A row of `count` (a multiple of 16) finite weights. A block whose scale rounds to 0 has byte 0 and zero codes.
TESSERA_HOST_DEVICE constexpr void nvfp4_quantize_weight_row(const float* x, int64_t count, float tensor_scale,
                                                             Nvfp4WeightRule rule, uint8_t* codes, uint8_t* scales) {
  for (int64_t block = 0; block < count / kNvfp4Block; ++block) {
    const float* values = x + block * kNvfp4Block;
    uint8_t* block_codes = codes + block * (kNvfp4Block / 2);
    const float amax = abs_max(values, kNvfp4Block);
    const uint8_t to_six = e4m3_from_float(amax / (kE2m1Max * tensor_scale));
    scales[block] = to_six;
    detail::nvfp4_encode_block(values, to_six, tensor_scale, block_codes);
    if (rule == Nvfp4WeightRule::kAmax) continue;
    const auto squared_error = [&](const uint8_t* candidate, uint8_t scale) {
      const float step = e4m3_to_float(scale) * tensor_scale;
      double error = 0;
      for (int i = 0; i < kNvfp4Block; ++i) {
        const double difference = static_cast<double>(values[i]) -
                                  e2m1_to_float(static_cast<uint8_t>(candidate[i / 2] >> (4 * (i % 2)))) * step;
        error += difference * difference;
      }
      return error;
    };
    const uint8_t to_four = e4m3_from_float(amax / (4 * tensor_scale));
    uint8_t other[kNvfp4Block / 2] = {};
    detail::nvfp4_encode_block(values, to_four, tensor_scale, other);
    if (squared_error(other, to_four) < squared_error(block_codes, to_six)) {
      scales[block] = to_four;
      for (int i = 0; i < kNvfp4Block / 2; ++i) block_codes[i] = other[i];
    }
  }
}

}  // namespace tessera::numeric
