// SPDX-License-Identifier: Apache-2.0
#pragma once
// Functions on vectors of FP32, for any instruction set that has `Math` (cpu_common/avx512_lanes.h, avx2/lanes.h).
// Included by kernel files only: all names are local to the file. The scalar functions are those of numeric/e8m0.h,
// which as inline functions would be compiled once for the whole program, perhaps with this instruction set.
#include <cstdint>

namespace tessera::backends::cpu_common {

namespace {

// UE8M0 to FP32 and up to UE8M0, NaN is 255.
inline float power_of_code(uint8_t code) {
  if (code == 255) return __builtin_bit_cast(float, uint32_t{0x7FC00000});
  return __builtin_bit_cast(float, code == 0 ? uint32_t{0x00400000} : static_cast<uint32_t>(code) << 23);
}
inline uint8_t power_code_above(float value) {
  if (value != value) return 255;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFF;
  if (bits <= 0x00400000) return 0;
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  return static_cast<uint8_t>(exponent < 254 ? exponent : 254);
}

// Within 2 units in the last place; 0 below -104 (AVX2: where the result would be subnormal), infinity above 88.8; NaN
// stays. Cody-Waite reduction by ln 2 in two parts, Taylor to degree 7 on |r| <= ln 2 / 2.
template <class Math>
inline typename Math::Vec exponential(typename Math::Vec x) {
  using Vec = typename Math::Vec;
  // The second operand is what a comparison with NaN gives.
  const Vec clamped = Math::max(Math::all(-104.0f), Math::min(Math::all(89.0f), x));
  const Vec shift = Math::all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = Math::fma(clamped, Math::all(1.44269504f), shift);
  const Vec n = Math::sub(shifted, shift);
  const Vec r = Math::fma(n, Math::all(2.12194440e-4f), Math::fma(n, Math::all(-0.693359375f), clamped));
  Vec p = Math::all(1.0f / 5040);
  p = Math::fma(p, r, Math::all(1.0f / 720));
  p = Math::fma(p, r, Math::all(1.0f / 120));
  p = Math::fma(p, r, Math::all(1.0f / 24));
  p = Math::fma(p, r, Math::all(1.0f / 6));
  p = Math::fma(p, r, Math::all(0.5f));
  p = Math::fma(p, r, Math::all(1.0f));
  p = Math::fma(p, r, Math::all(1.0f));
  return Math::times_power(p, n);
}

}  // namespace

}  // namespace tessera::backends::cpu_common
