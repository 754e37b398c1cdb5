// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small text helpers that several rooms need.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// `text` made safe for one line of a terminal: control characters and bytes that are not valid UTF-8 become \xNN, and
// anything past `max_bytes` is cut and marked with "...".
std::string printable(std::string_view text, size_t max_bytes = 240);

// Length in bytes of the longest prefix of `bytes` that does not end inside a UTF-8 sequence which more bytes could
// still complete. Invalid bytes count as complete (they can never become valid).
size_t complete_utf8_prefix(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);

// `bytes` with every maximal invalid part replaced by U+FFFD, as the Unicode standard recommends (chapter 3.9).
std::string replace_invalid_utf8(std::string_view bytes);

// Decodes the code point that starts at text[pos] and moves pos past it; 0xFFFD (moving one byte) where invalid.
char32_t next_code_point(std::string_view text, size_t& pos);

// Appends the UTF-8 form of a code point.
void append_utf8(std::string& out, char32_t code_point);

// The parts of `text` between separators: "a,,b" has three, "" has one (empty). They point into `text`.
std::vector<std::string_view> split(std::string_view text, char separator);

// "1.50 GiB", "12.0 MiB", "17 B": powers of 1024.
std::string format_bytes(uint64_t bytes);

}  // namespace tessera
