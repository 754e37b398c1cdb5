// SPDX-License-Identifier: Apache-2.0
#pragma once
// E2M1 (FP4): sign, two exponent bits (bias 1), one mantissa bit. Magnitudes by code 0..7: 0 0.5 1 1.5 2 3 4 6; no
// infinity, no NaN. Source: OCP Microscaling Formats specification 1.0, section 5.3.3; PTX ISA,
// cvt.rn.satfinite.e2m1x2.
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "numeric/small_float.h"

namespace tessera::numeric {

constexpr float kE2m1Max = 6;

// The value of the low four bits.
TESSERA_HOST_DEVICE constexpr float e2m1_to_float(uint8_t code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float magnitude =
      exponent == 0 ? 0.5f * static_cast<float>(mantissa) : static_cast<float>((2 + mantissa) << exponent) * 0.25f;
  return code & 8 ? -magnitude : magnitude;
}

// Nearest, ties to even, saturating; the sign is kept (-0 gives 8); NaN gives +6, as the hardware conversion does.
TESSERA_HOST_DEVICE constexpr uint8_t e2m1_from_float(float value) {
  if (value != value) return 7;
  const uint32_t sign = __builtin_bit_cast(uint32_t, value) >> 31;
  return static_cast<uint8_t>(small_float_code(value, 1, 1, 7) | sign << 3);
}

struct E2m1Pair {
  float low, high;
};

// Both values of every byte: the even element is the low nibble.
constexpr std::array<E2m1Pair, 256> kE2m1Pairs = [] {
  std::array<E2m1Pair, 256> table{};
  for (std::size_t byte = 0; byte < table.size(); ++byte) {
    table[byte] = {e2m1_to_float(static_cast<uint8_t>(byte & 15)), e2m1_to_float(static_cast<uint8_t>(byte >> 4))};
  }
  return table;
}();

}  // namespace tessera::numeric
