// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kind::mxf4nvf4 with block16 scales adds, in whole numbers, bit for bit: 64 products in four groups of 16, and
// the old sum. Source: the behaviour that microsoft/MMA-Sim derives from measurements on Blackwell (arXiv 2511.10909):
//   a group's sum is exact, and so is its product with both scales' significands
//   the four terms and the old sum are aligned to the largest of their five exponents, each cut off towards zero 35
//   bits behind the binary point; a term's exponent is that of its scales, whatever the group's sum
//   they add exactly; the total is cut off towards zero to FP32
//   a scale or an old sum that is NaN gives 0x7FFFFFFF; scales have no sign: that bit is ignored
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common::ptx::emulated {

constexpr int kGroupsOfProduct = 4, kProductsOfGroup = 16;
constexpr uint32_t kSumOfNan = 0x7FFFFFFF;

// An E2M1 code as a number of halves: 0 1 2 3 4 6 8 12 and their negatives.
TESSERA_HOST_DEVICE constexpr int halves_of_e2m1(uint32_t code) {
  constexpr uint64_t kHalves = 0x0C08060403020100;  // a byte each
  const int magnitude = static_cast<int>(kHalves >> (code & 7) * 8 & 15);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// significand * 2^(exponent - fraction_bits)
struct SplitNumber {
  int64_t significand;
  int exponent;
};

// UE4M3, three fraction bits. Zero: an exponent below all others'.
TESSERA_HOST_DEVICE constexpr SplitNumber split_ue4m3(uint8_t code) {
  const int field = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0) return {0, -126};
  return field == 0 ? SplitNumber{mantissa, -6} : SplitNumber{8 + mantissa, field - 7};
}
TESSERA_HOST_DEVICE constexpr bool is_ue4m3_nan(uint8_t code) {
  return (code & 0x7F) == 0x7F;
}

// FP32, 23 fraction bits; finite.
TESSERA_HOST_DEVICE constexpr SplitNumber split_f32(uint32_t bits) {
  const int field = static_cast<int>(bits >> 23 & 255);
  const int64_t mantissa = bits & 0x7FFFFF, magnitude = field == 0 ? mantissa : mantissa | 0x800000;
  return {bits >> 31 != 0 ? -magnitude : magnitude, field == 0 ? -126 : field - 127};
}

// value >> count, towards zero.
TESSERA_HOST_DEVICE constexpr int64_t cut_off(int64_t value, int count) {
  if (count > 62) return 0;
  return value < 0 ? -(-value >> count) : value >> count;
}

// FP32 bits of sum * 2^(exponent - 35), cut off towards zero. |sum| < 2^62.
TESSERA_HOST_DEVICE constexpr uint32_t f32_towards_zero(int64_t sum, int exponent) {
  if (sum == 0) return 0;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  const uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  int top = 62;  // the highest bit set
  while ((magnitude >> top & 1) == 0) --top;
  const int of_sum = exponent + top - 35;
  if (of_sum > 127) return sign | 0x7F7FFFFF;
  const int of_f32 = of_sum < -126 ? -126 : of_sum;  // subnormal numbers have that of the least normal one
  const int down = of_f32 - 23 - (exponent - 35);    // of the last bit that stays
  const uint64_t significand = down >= 64 ? 0 : down >= 0 ? magnitude >> down : magnitude << -down;
  return sign | static_cast<uint32_t>(significand & 0x7FFFFF) |
         (significand >= 0x800000 ? static_cast<uint32_t>(of_f32 + 127) << 23 : 0);
}

// The new sum's bits: `group_sums` in quarters (products of two codes' halves), scales of both operands' groups.
TESSERA_HOST_DEVICE constexpr uint32_t add_scaled_groups(uint32_t old_sum, const int (&group_sums)[kGroupsOfProduct],
                                                         const uint8_t (&a_scales)[kGroupsOfProduct],
                                                         const uint8_t (&b_scales)[kGroupsOfProduct]) {
  constexpr int kFraction = 35;     // bits kept when numbers are aligned
  constexpr int kTermFraction = 8;  // quarters, and three bits of each scale
  constexpr int kSumFraction = 23;  // of FP32
  bool has_nan = (old_sum & 0x7FFFFFFF) > 0x7F800000;
  for (int i = 0; i < kGroupsOfProduct; ++i) has_nan |= is_ue4m3_nan(a_scales[i]) || is_ue4m3_nan(b_scales[i]);
  if (has_nan) return kSumOfNan;
  if ((old_sum & 0x7F800000) == 0x7F800000) return old_sum;  // infinite

  SplitNumber numbers[kGroupsOfProduct + 1] = {};
  const SplitNumber old = split_f32(old_sum);
  numbers[kGroupsOfProduct] = {old.significand * (int64_t{1} << (kFraction - kSumFraction)), old.exponent};
  int largest = old.exponent;
  for (int i = 0; i < kGroupsOfProduct; ++i) {
    const SplitNumber a = split_ue4m3(a_scales[i]), b = split_ue4m3(b_scales[i]);
    const int64_t term = int64_t{group_sums[i]} * a.significand * b.significand;
    numbers[i] = {term * (int64_t{1} << (kFraction - kTermFraction)), a.exponent + b.exponent};
    if (numbers[i].exponent > largest) largest = numbers[i].exponent;
  }
  int64_t sum = 0;
  for (const SplitNumber& number : numbers) sum += cut_off(number.significand, largest - number.exponent);
  return f32_towards_zero(sum, largest);
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
