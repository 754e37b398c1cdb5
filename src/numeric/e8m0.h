// SPDX-License-Identifier: Apache-2.0
#pragma once
// UE8M0: a power of two, 2^(byte - 127); 255 is NaN, byte 0 is the FP32 subnormal 2^-127. Never a numeric cast.
// Source: OCP Microscaling Formats specification 1.0, section 5.4.1.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::numeric {

constexpr uint8_t kE8m0Nan = 255;

TESSERA_HOST_DEVICE constexpr float e8m0_to_float(uint8_t byte) {
  if (byte == kE8m0Nan) return __builtin_bit_cast(float, uint32_t{0x7FC00000});
  return __builtin_bit_cast(float, byte == 0 ? uint32_t{0x00400000} : static_cast<uint32_t>(byte) << 23);
}

// The smallest power of two that is at least `value` > 0, in [2^-127, 2^127]; NaN gives 255.
TESSERA_HOST_DEVICE constexpr uint8_t e8m0_from_float_up(float value) {
  if (value != value) return kE8m0Nan;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFF;
  if (bits <= 0x00400000) return 0;  // up to 2^-127
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  return static_cast<uint8_t>(exponent < 254 ? exponent : 254);
}

}  // namespace tessera::numeric
