// SPDX-License-Identifier: Apache-2.0
#include "model/stored_values.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "numeric/bf16.h"

namespace tessera::model {

using checkpoint::LocatedTensor;

void fail_value(const LocatedTensor& tensor, int64_t index, const std::string& expected, const std::string& found) {
  fail_data(tensor.file->path(), fmt::format("tensor {} at element {}", tensor.entry->name, index), expected, found);
}

void widen(DType stored, const void* bytes, int64_t count, float* out) {
  if (stored == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(bytes) + 2 * i, 2);
    out[i] = numeric::bf16_to_float(bits);
  }
}

void check_finite(const LocatedTensor& tensor, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) fail_value(tensor, i, "a finite value", fmt::format("{}", values[i]));
  }
}

// Exponent field all ones: infinity or NaN.
void check_finite_bf16(const LocatedTensor& tensor, const uint16_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if ((values[i] & 0x7F80) == 0x7F80) fail_value(tensor, i, "a finite value", "a NaN or an infinity");
  }
}

void check_e4m3(const LocatedTensor& tensor, const uint8_t* codes, int64_t count, SignBit sign, const char* expected) {
  const uint8_t mask = sign == SignBit::kFree ? 0x7F : 0xFF;
  for (int64_t i = 0; i < count; ++i) {
    if ((codes[i] & mask) > 0x7E) fail_value(tensor, i, expected, fmt::format("byte 0x{:02x}", codes[i]));
  }
}

}  // namespace tessera::model
