// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rounding to E2M1 without the code between: half as many steps.
#include <cstdint>

#include "base/host_device.h"
#include "numeric/e2m1.h"

namespace tessera::numeric {

// e2m1_to_float(e2m1_from_float(value)). `value` must not be NaN.
TESSERA_HOST_DEVICE constexpr float e2m1_rounded(float value) {
  constexpr float kHalves = 0x1.8p22f;  // numbers of this size are 0.5 apart
  const uint32_t sign = __builtin_bit_cast(uint32_t, value) & 0x80000000;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFF;
  const float magnitude = __builtin_bit_cast(float, bits);
  const uint32_t one_bit = (bits + 0x1FFFFF + (bits >> 22 & 1)) & 0xFFC00000;
  const float rounded = magnitude < 1 ? (magnitude + kHalves) - kHalves : __builtin_bit_cast(float, one_bit);
  const float kept = magnitude > kE2m1Max ? kE2m1Max : rounded;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, kept) | sign);
}

}  // namespace tessera::numeric
