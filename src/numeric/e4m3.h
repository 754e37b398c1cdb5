// SPDX-License-Identifier: Apache-2.0
#pragma once
// E4M3 (FP8 "fn"): sign, four exponent bits (bias 7), three mantissa bits; largest 448, smallest subnormal 2^-9, no
// infinity, NaN 0x7F and 0xFF. Source: "FP8 formats for deep learning", arXiv 2209.05433.
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "numeric/small_float.h"

namespace tessera::numeric {

constexpr float kE4m3Max = 448;
constexpr uint8_t kE4m3Nan = 0x7F;

TESSERA_HOST_DEVICE constexpr float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7F;
  if (magnitude == 0x7F) return __builtin_bit_cast(float, sign | 0x7FC00000);
  // At the end of FP32's exponent and the begin of its mantissa the bits are the value times 2^-120, subnormals too.
  return __builtin_bit_cast(float, sign | magnitude << 20) * 0x1p120f;
}

// Nearest, ties to even, saturating to 448 (infinity too); NaN gives 0x7F.
TESSERA_HOST_DEVICE constexpr uint8_t e4m3_from_float(float value) {
  if (value != value) return kE4m3Nan;
  const uint32_t sign = __builtin_bit_cast(uint32_t, value) >> 31;
  return static_cast<uint8_t>(small_float_code(value, 3, 7, 0x7E) | sign << 7);
}

constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> table{};
  for (std::size_t code = 0; code < table.size(); ++code) table[code] = e4m3_to_float(static_cast<uint8_t>(code));
  return table;
}();

}  // namespace tessera::numeric
