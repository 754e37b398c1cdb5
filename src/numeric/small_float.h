// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rounding to a small binary float format by its parameters; e2m1.h and e4m3.h are two of them.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::numeric {

// Code (without sign) of |value| in a format with `mantissa_bits`, exponent `bias`, subnormals and no infinity:
// nearest, ties to even; `max_code` is the largest finite code, at which it saturates. `value` must not be NaN.
TESSERA_HOST_DEVICE constexpr uint32_t small_float_code(float value, int mantissa_bits, int bias, uint32_t max_code) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFF;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const int min_exponent = 1 - bias;   // of the smallest normal
  if (exponent > 15) return max_code;  // also infinity; both formats end far below
  // |value| = significand * 2^(exponent - 23); FP32 subnormals are below every format's half step.
  const uint32_t significand = (bits & 0x7FFFFF) | 0x800000;
  if ((bits >> 23) == 0) return 0;
  const int shift = 23 - mantissa_bits + (exponent < min_exponent ? min_exponent - exponent : 0);
  if (shift > 25) return 0;
  const uint32_t half = uint32_t{1} << (shift - 1);
  const uint32_t kept = significand >> shift, rest = significand & ((uint32_t{1} << shift) - 1);
  const uint32_t rounded = kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
  // The implicit bit of a normal adds one to the exponent field; a carry out of the mantissa does so again.
  const int field = exponent < min_exponent ? 0 : exponent + bias - 1;
  const uint32_t code = (static_cast<uint32_t>(field) << mantissa_bits) + rounded;
  return code < max_code ? code : max_code;
}

}  // namespace tessera::numeric
