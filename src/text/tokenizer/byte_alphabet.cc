// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/byte_alphabet.h"

#include <array>

#include "base/strings.h"

namespace tessera::text {

namespace {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

constexpr std::array<char32_t, 256> kCodePoints = [] {
  std::array<char32_t, 256> table{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    table[static_cast<size_t>(byte)] = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
  }
  return table;
}();

constexpr size_t kNumCodePoints = 0x100 + 68;

// -1 where the code point is no byte's.
constexpr std::array<int16_t, kNumCodePoints> kBytes = [] {
  std::array<int16_t, kNumCodePoints> table{};
  for (int16_t& entry : table) entry = -1;
  for (size_t byte = 0; byte < kCodePoints.size(); ++byte) table[kCodePoints[byte]] = static_cast<int16_t>(byte);
  return table;
}();

}  // namespace

char32_t byte_to_code_point(uint8_t byte) {
  return kCodePoints[byte];
}

std::optional<std::string> alphabet_to_bytes(std::string_view text) {
  std::string bytes;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = next_code_point(text, pos);
    if (code >= kNumCodePoints || kBytes[code] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kBytes[code]));
  }
  return bytes;
}

}  // namespace tessera::text
