// SPDX-License-Identifier: Apache-2.0
#include "base/strings.h"

#include <fmt/format.h>

#include <array>

namespace tessera {

namespace {

// Length of the well-formed UTF-8 sequence at text[pos], or 0. `needs` is set where the text ends inside a sequence
// that is valid so far. Table 3-7 of the Unicode standard.
size_t sequence_length(std::string_view text, size_t pos, bool* is_cut, size_t* valid_part) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  *is_cut = false;
  *valid_part = 1;
  const unsigned lead = byte(pos);
  if (lead < 0x80) return 1;
  size_t length = 0;
  unsigned low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if (pos + i >= text.size()) {
      *is_cut = true;
      return 0;
    }
    const unsigned next = byte(pos + i);
    if (next < low || next > high) return 0;
    low = 0x80, high = 0xBF;
    *valid_part = i + 1;
  }
  return length;
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    if (out.size() >= max_bytes) return out + "...";
    bool is_cut = false;
    size_t valid_part = 1;
    const size_t length = sequence_length(text, pos, &is_cut, &valid_part);
    const unsigned char lead = static_cast<unsigned char>(text[pos]);
    // C1 controls (U+0080 to U+009F) are as bad for a terminal as C0.
    const bool is_control =
        lead < 0x20 || lead == 0x7F || (lead == 0xC2 && length == 2 && (text[pos + 1] & 0xE0) == 0x80);
    if (length == 0 || is_control) {
      out += fmt::format("\\x{:02x}", lead);
      ++pos;
    } else {
      out.append(text.substr(pos, length));
      pos += length;
    }
  }
  return out;
}

size_t complete_utf8_prefix(std::string_view bytes) {
  const size_t first = bytes.size() > 3 ? bytes.size() - 3 : 0;
  for (size_t pos = bytes.size(); pos-- > first;) {
    bool is_cut = false;
    size_t valid_part = 1;
    if (sequence_length(bytes, pos, &is_cut, &valid_part) == 0 && is_cut) return pos;
    if ((static_cast<unsigned char>(bytes[pos]) & 0xC0) != 0x80) break;  // a lead byte that is not cut ends the search
  }
  return bytes.size();
}

bool is_valid_utf8(std::string_view bytes) {
  for (size_t pos = 0; pos < bytes.size();) {
    bool is_cut = false;
    size_t valid_part = 1;
    const size_t length = sequence_length(bytes, pos, &is_cut, &valid_part);
    if (length == 0) return false;
    pos += length;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (size_t pos = 0; pos < bytes.size();) {
    bool is_cut = false;
    size_t valid_part = 1;
    const size_t length = sequence_length(bytes, pos, &is_cut, &valid_part);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      pos += valid_part;
    } else {
      out.append(bytes.substr(pos, length));
      pos += length;
    }
  }
  return out;
}

char32_t next_code_point(std::string_view text, size_t& pos) {
  bool is_cut = false;
  size_t valid_part = 1;
  const size_t length = sequence_length(text, pos, &is_cut, &valid_part);
  if (length == 0) {
    ++pos;
    return 0xFFFD;
  }
  constexpr std::array<unsigned, 5> kLeadMask = {0, 0x7F, 0x1F, 0x0F, 0x07};
  char32_t code = static_cast<unsigned char>(text[pos]) & kLeadMask[length];
  for (size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<unsigned char>(text[pos + i]) & 0x3F);
  pos += length;
  return code;
}

void append_utf8(std::string& out, char32_t code_point) {
  auto push = [&](unsigned value) { out.push_back(static_cast<char>(value)); };
  if (code_point < 0x80) {
    push(code_point);
  } else if (code_point < 0x800) {
    push(0xC0 | code_point >> 6), push(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    push(0xE0 | code_point >> 12), push(0x80 | (code_point >> 6 & 0x3F)), push(0x80 | (code_point & 0x3F));
  } else {
    push(0xF0 | code_point >> 18), push(0x80 | (code_point >> 12 & 0x3F)), push(0x80 | (code_point >> 6 & 0x3F));
    push(0x80 | (code_point & 0x3F));
  }
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::string format_bytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace tessera
