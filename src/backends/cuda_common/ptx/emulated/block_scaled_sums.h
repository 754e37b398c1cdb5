// SPDX-License-Identifier: Apache-2.0
#pragma once
// What Blackwell's tensor cores add in one step of kind::mxf4nvf4 with a UE4M3 scale per 16: four sums of 16 products
// and the old sum. Sums of products are exact, and so are they times both scales' significands; the five terms are cut
// (toward zero) to 35 bits behind the point of the largest exponent among them, added exactly, and cut to FP32. A
// term's exponent is that of its two scales, whatever its products are.
// Source: microsoft/MMA-Sim, mmasim/simulator/arithmetic.py (nv_fused_dot_add_with_block_scale), which was derived from
// hardware; arXiv 2511.10909.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// Twice the value of the low four bits, E2M1.
TESSERA_HOST_DEVICE constexpr int e2m1_halves(uint32_t code) {
  const int exponent = static_cast<int>(code >> 1 & 3), mantissa = static_cast<int>(code & 1);
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// significand * 2^(exponent - fraction bits): three bits for a scale, 23 for FP32.
struct BinaryParts {
  int64_t significand;
  int exponent;
};

// As it is added: zero has the exponent of FP32's smallest numbers, so that it never is the largest.
constexpr int kLeastExponent = -126;
constexpr uint32_t kCanonicalNan = 0x7FFFFFFF;

TESSERA_HOST_DEVICE constexpr bool is_ue4m3_nan(uint32_t byte) {
  return (byte & 0x7F) == 0x7F;
}
// Bit 7 does not count.
TESSERA_HOST_DEVICE constexpr BinaryParts ue4m3_parts(uint32_t byte) {
  const int field = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  if (field == 0) return {mantissa, mantissa == 0 ? kLeastExponent : -6};
  return {8 + mantissa, field - 7};
}

// magnitude * 2^-places, toward zero.
TESSERA_HOST_DEVICE constexpr int64_t cut(int64_t value, int places) {
  if (places > 62) return 0;
  return value < 0 ? -(-value >> places) : value >> places;
}

// sum * 2^(exponent - 35) as FP32, toward zero; too large: infinity.
TESSERA_HOST_DEVICE constexpr float cut_to_float(int64_t sum, int exponent) {
  if (sum == 0) return 0;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  int top = 0;  // the highest bit
  for (int step = 32; step > 0; step /= 2) {
    if (magnitude >> top >> step != 0) top += step;
  }
  const int leading = top + exponent - 35;  // its weight
  if (leading > 127) return __builtin_bit_cast(float, sign | 0x7F800000u);
  const int last = leading < kLeastExponent ? kLeastExponent - 23 : leading - 23;  // weight of FP32's last bit
  const int drop = last - (exponent - 35);
  magnitude = drop > 63 ? 0 : drop >= 0 ? magnitude >> drop : magnitude << -drop;
  const uint32_t field = leading < kLeastExponent ? 0 : static_cast<uint32_t>(leading + 127);
  return __builtin_bit_cast(float, sign | field << 23 | (static_cast<uint32_t>(magnitude) & 0x7FFFFF));
}

// The new sum. dots[j]: of 16 products of values in halves, that is in quarters; byte j of each word is its scale.
TESSERA_HOST_DEVICE constexpr float block_scaled_sum(const int (&dots)[4], uint32_t a_scales, uint32_t b_scales,
                                                     float sum) {
  constexpr int kFraction = 35, kDotFraction = 2 + 3 + 3, kSumFraction = 23;
  const uint32_t bits = __builtin_bit_cast(uint32_t, sum), field = bits >> 23 & 0xFF, mantissa = bits & 0x7FFFFF;
  bool is_nan = field == 0xFF && mantissa != 0;
  BinaryParts terms[5] = {};
  for (int j = 0; j < 4; ++j) {
    const uint32_t a = a_scales >> 8 * j & 0xFF, b = b_scales >> 8 * j & 0xFF;
    is_nan = is_nan || is_ue4m3_nan(a) || is_ue4m3_nan(b);
    const BinaryParts a_parts = ue4m3_parts(a), b_parts = ue4m3_parts(b);
    terms[j] = {dots[j] * a_parts.significand * b_parts.significand * (int64_t{1} << (kFraction - kDotFraction)),
                a_parts.exponent + b_parts.exponent};
  }
  if (is_nan) return __builtin_bit_cast(float, kCanonicalNan);
  if (field == 0xFF) return sum;  // infinite
  const int64_t significand = int64_t{mantissa} | (field == 0 ? 0 : 0x800000);
  terms[4] = {((bits >> 31) != 0 ? -significand : significand) * (int64_t{1} << (kFraction - kSumFraction)),
              field == 0 ? kLeastExponent : static_cast<int>(field) - 127};
  int largest = terms[0].exponent;
  for (const BinaryParts& term : terms) largest = term.exponent > largest ? term.exponent : largest;
  int64_t total = 0;
  for (const BinaryParts& term : terms) total += cut(term.significand, largest - term.exponent);
  return cut_to_float(total, largest);
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
