// SPDX-License-Identifier: Apache-2.0
#include "text/chat/python_json.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace tessera::text {

namespace {

// Python's repr of a float: plain digits for exponents from -4 to 15, else d.ddde+XX.
std::string python_float(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  char buffer[32];  // the shortest form needs at most 24
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t mark = text.find('e');
  int exponent = 0;
  const char* exponent_begin = text.data() + mark + (text[mark + 1] == '+' ? 2 : 1);
  std::from_chars(exponent_begin, end, exponent);
  if (exponent < -4 || exponent >= 16) return std::string(text);  // to_chars writes two digits at least, as Python

  std::string digits, out;
  for (const char c : text.substr(0, mark)) {
    if (c == '-') out += '-';
    if (c >= '0' && c <= '9') digits += c;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

void append(std::string& out, const Json& value) {
  switch (value.kind()) {
    case Json::Kind::kNull:
      out += "null";
      break;
    case Json::Kind::kBool:
      out += value.boolean() ? "true" : "false";
      break;
    case Json::Kind::kInt:
      out += fmt::format("{}", value.integer());
      break;
    case Json::Kind::kBigInt:
      out += value.big_integer();
      break;
    case Json::Kind::kDouble:
      out += python_float(value.number());
      break;
    case Json::Kind::kString:
      out += json_quoted(value.string());
      break;
    case Json::Kind::kArray: {
      const char* separator = "[";
      for (const Json& element : value.array()) {
        out += separator;
        append(out, element);
        separator = ", ";
      }
      out += value.array().empty() ? "[]" : "]";
      break;
    }
    case Json::Kind::kObject: {
      const char* separator = "{";
      for (const auto& [key, member] : value.object()) {
        out += separator;
        out += json_quoted(key);
        out += ": ";
        append(out, member);
        separator = ", ";
      }
      out += value.object().empty() ? "{}" : "}";
      break;
    }
  }
}

}  // namespace

std::string python_json(const Json& value) {
  std::string out;
  append(out, value);
  return out;
}

void append_json_escaped(std::string& out, std::string_view text) {
  static constexpr std::string_view kSpecial = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
  for (const char c : text) {
    const size_t which = kSpecial.find(c);
    if (which != std::string_view::npos) {
      out += '\\';
      out += kLetters[which];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
}

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  append_json_escaped(out, text);
  out += '"';
  return out;
}

}  // namespace tessera::text
