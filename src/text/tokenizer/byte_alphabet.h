// SPDX-License-Identifier: Apache-2.0
#pragma once
// The byte-level alphabet: every byte has a printable code point, so that a vocabulary of bytes can be written as text.
// Bytes 33-126, 161-172 and 174-255 stand for themselves; the other 68, in order, are U+0100 onward.
// Source: openai/gpt-2, encoder.py, bytes_to_unicode.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

char32_t byte_to_code_point(uint8_t byte);
// The bytes that a text of the alphabet stands for; nothing where a code point is outside it.
std::optional<std::string> alphabet_to_bytes(std::string_view text);

}  // namespace tessera::text
