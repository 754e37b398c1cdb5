// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/pattern.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "base/error.h"
#include "base/strings.h"
#include "text/grammar/code_points.h"

namespace tessera::text {

namespace {

constexpr int kMaxNesting = 100;  // of groups

CodePoints digits() {
  return {{'0', '9'}};
}
CodePoints word() {
  return {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
}
// For both dialects.
CodePoints spaces() {
  return {{'\t', '\r'}, {' ', ' '}};
}
// For either.
CodePoints all_spaces() {
  return {{'\t', '\r'},     {0x1C, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
          {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
}
CodePoints line_ends() {
  return {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
}
// NUL, and what UTF-8 does not have.
CodePoints no_text() {
  return {{0, 0}, {0xD800, 0xDFFF}};
}
CodePoints escaped_in_json() {
  return {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
}

// Escapes alone: what stands for itself differs between the compiler's ways to read a pattern.
std::string code_point_escape(uint32_t c) {
  return fmt::format("\\u{{{:x}}}", c);
}

// As Python's json writes it.
std::string json_escape(uint32_t c) {
  constexpr std::pair<uint32_t, char> kShort[] = {{'"', '"'},  {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'},
                                                  {'\n', 'n'}, {'\r', 'r'},  {'\t', 't'}};
  for (const auto& [code_point, letter] : kShort) {
    if (code_point == c) return {'\\', letter};
  }
  return fmt::format("\\u{:04x}", c);
}

std::string literal(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) out += code_point_escape(next_code_point(text, at));
  return out;
}

class PatternReader {
 public:
  PatternReader(std::string_view pattern, PatternUse use) : text_(pattern), use_(use) {}

  std::string read() {
    const std::string whole = alternatives(0);
    if (at_ < text_.size()) refuse("a group to end", ")");
    return whole;
  }

 private:
  [[noreturn]] void refuse(std::string_view expected, std::string_view found) const {
    fail(ErrorCode::kInvalidArgument, fmt::format("regular expression, byte {}: expected {}, found {}", at_, expected,
                                                  found.empty() ? "the end" : printable(found, 20)));
  }
  [[noreturn]] void refuse(std::string_view expected) const { refuse(expected, text_.substr(at_, 8)); }

  bool starts_with(std::string_view part) const { return text_.substr(at_).starts_with(part); }
  bool take(std::string_view part) {
    if (!starts_with(part)) return false;
    at_ += part.size();
    return true;
  }

  // Each returns an expression, or nothing for the empty text; an atom's is one for a quantifier.
  std::string alternatives(int depth) {
    if (depth > kMaxNesting) refuse(fmt::format("groups at most {} deep", kMaxNesting));
    std::string all;
    bool has_empty = false;
    do {
      const std::string one = sequence(depth);
      has_empty |= one.empty();
      if (!one.empty()) all += (all.empty() ? "" : "|") + one;
    } while (take("|"));
    return has_empty && !all.empty() ? "(" + all + ")?" : all;
  }

  std::string sequence(int depth) {
    std::string all;
    const size_t first = at_;
    while (at_ < text_.size() && text_[at_] != '|' && text_[at_] != ')') {
      if (text_[at_] == '^' || text_[at_] == '$') {
        anchor(depth, first);
        continue;
      }
      const std::string one = atom(depth);
      const std::string times = quantifier();
      if (one.empty() || times == "{0}") continue;
      all += one + times;
    }
    return all;
  }

  // The whole text is meant, so those at its ends say nothing.
  void anchor(int depth, size_t first) {
    const bool is_begin = text_[at_] == '^' && at_ == first;
    const bool is_end = text_[at_] == '$' && (at_ + 1 == text_.size() || text_[at_ + 1] == '|');
    if (depth > 0 || (!is_begin && !is_end)) refuse("^ and $ at the ends alone");
    ++at_;
  }

  std::string atom(int depth) {
    switch (text_[at_]) {
      case '(':
        return group(depth);
      case '[':
        return character(char_class());
      case '.':
        ++at_;
        return character(line_ends().others());
      case '*':
      case '+':
      case '?':
        refuse("something to repeat");
      case '{':
        if (at_ + 1 < text_.size() && text_[at_ + 1] >= '0' && text_[at_ + 1] <= '9') refuse("something to repeat");
        break;
      case '\\':
        if (const auto set = set_escape()) return character(*set);
        return one_character(escaped());
      default:
        break;
    }
    return one_character(next_code_point(text_, at_));
  }

  std::string group(int depth) {
    ++at_;
    if (starts_with("?=") || starts_with("?!") || starts_with("?<=") || starts_with("?<!")) refuse("no lookaround");
    if (take("?P<") || take("?<")) {
      const size_t end = text_.find('>', at_);
      if (end == std::string_view::npos) refuse("a group's name and >");
      at_ = end + 1;
    } else if (!take("?:") && starts_with("?")) {
      refuse("(, (?: or (?<name>");
    }
    const std::string inner = alternatives(depth + 1);
    if (!take(")")) refuse(")");
    return inner.empty() ? "" : "(" + inner + ")";
  }

  // "*", "{2,3}" or the like; empty: none. That few are wanted first changes nothing in what fits.
  std::string quantifier() {
    std::string times;
    if (at_ < text_.size() && std::string_view("*+?").find(text_[at_]) != std::string_view::npos) {
      times = text_[at_++];
    } else if (starts_with("{")) {
      times = counts();
    }
    if (times.empty()) return times;
    take("?");
    const bool goes_on = starts_with("*") || starts_with("+") || starts_with("?") ||
                         (starts_with("{") && at_ + 1 < text_.size() && text_[at_ + 1] >= '0' && text_[at_ + 1] <= '9');
    if (goes_on) refuse("one repetition");
    return times;
  }

  // "{m}", "{m,}" or "{m,n}"; empty where the brace is a character as others are.
  std::string counts() {
    const size_t end = text_.find('}', at_);
    const std::string_view inner = end == std::string_view::npos ? "" : text_.substr(at_ + 1, end - at_ - 1);
    const size_t comma = inner.find(',');
    const std::string_view low = inner.substr(0, comma);
    const std::string_view high = comma == std::string_view::npos ? low : inner.substr(comma + 1);
    const auto is_number = [](std::string_view text) {
      return text.find_first_not_of("0123456789") == std::string_view::npos;
    };
    if (inner.empty() || !is_number(low) || !is_number(high)) return "";
    if (low.empty()) refuse("{m}, {m,} or {m,n}");  // {,n}: the dialects differ
    const auto value = [&](std::string_view digits) {
      size_t number = 0;
      std::from_chars(digits.data(), digits.data() + digits.size(), number);
      if (number > kMaxPatternRepeats) refuse(fmt::format("at most {} times", kMaxPatternRepeats));
      return number;
    };
    const size_t least = value(low), most = high.empty() ? kMaxPatternRepeats : value(high);
    if (least > most) refuse("{m,n} with m at most n");
    at_ = end + 1;
    if (high.empty()) return fmt::format("{{{},}}", least);
    if (most == 0) return "{0}";
    return least == most ? fmt::format("{{{}}}", least) : fmt::format("{{{},{}}}", least, most);
  }

  CodePoints char_class() {
    ++at_;
    const bool is_negated = take("^");
    if (starts_with("]")) refuse("a character");  // the dialects differ
    CodePoints all;
    while (!take("]")) {
      if (at_ == text_.size()) refuse("]");
      const auto set = starts_with("\\") ? set_escape() : std::nullopt;
      if (set) all.add(*set);
      const uint32_t first = set ? 0 : class_character();
      const bool is_range = starts_with("-") && !starts_with("-]");
      if (set && is_range) refuse("a range of characters");
      if (!set && !is_range) all.add({first, first});
      if (set || !is_range) continue;
      ++at_;
      if (at_ == text_.size() || (starts_with("\\") && set_escape())) refuse("a range of characters");
      const uint32_t last = class_character();
      if (last < first) refuse("a range from a lower to a higher character");
      all.add({first, last});
    }
    return is_negated ? all.others() : all;
  }

  uint32_t class_character() {
    if (take("\\b")) return '\b';
    return starts_with("\\") ? escaped() : static_cast<uint32_t>(next_code_point(text_, at_));
  }

  // \d and the like, which stand for several characters.
  std::optional<CodePoints> set_escape() {
    if (take("\\d")) return digits();
    if (take("\\D")) return digits().others();
    if (take("\\w")) return word();
    if (take("\\W")) return word().others();
    if (take("\\s")) return spaces();
    if (take("\\S")) return all_spaces().others();
    return std::nullopt;
  }

  // The one character that an escape stands for.
  uint32_t escaped() {
    constexpr std::pair<char, char> kLetters[] = {{'t', '\t'}, {'n', '\n'}, {'r', '\r'}, {'f', '\f'}, {'v', '\v'}};
    const size_t begin = at_++;
    if (at_ == text_.size()) refuse("a character to escape");
    const char c = text_[at_];
    for (const auto& [letter, character] : kLetters) {
      if (c == letter) return ++at_, static_cast<uint32_t>(character);
    }
    if (c == 'x') return ++at_, hexadecimal(2);
    if (c == 'u') return ++at_, unicode();
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (is_letter) {
      at_ = begin;
      refuse("an escape of one character, of digits, words or spaces");
    }
    return next_code_point(text_, at_);
  }

  uint32_t unicode() {
    if (take("{")) {
      const size_t end = text_.find('}', at_);
      if (end == std::string_view::npos || end == at_ || end - at_ > 6) refuse("1 to 6 hexadecimal digits and }");
      const uint32_t c = hexadecimal(end - at_);
      ++at_;
      if (c > CodePoints::kLast) refuse("a code point of Unicode");
      return c;
    }
    const uint32_t high = hexadecimal(4);
    if (high < 0xD800 || high > 0xDBFF || !take("\\u")) return high;
    const uint32_t low = hexadecimal(4);
    if (low < 0xDC00 || low > 0xDFFF) refuse("the second half of a surrogate pair");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  uint32_t hexadecimal(size_t num_digits) {
    uint32_t value = 0;
    const std::string_view digits = text_.substr(at_, num_digits);
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != num_digits || error != std::errc() || stop != digits.data() + digits.size()) {
      refuse(fmt::format("{} hexadecimal digits", num_digits));
    }
    at_ += num_digits;
    return value;
  }

  std::string one_character(uint32_t c) { return character({{c, c}}); }

  // One of `set`, as it is where one can stand here so.
  std::string character(const CodePoints& set) {
    const CodePoints text = set.without(no_text());
    const CodePoints plain = use_ == PatternUse::kAnswer ? text : text.without(escaped_in_json());
    if (!plain.is_empty()) return class_of(plain);
    const CodePoints escaped = set.without(escaped_in_json().others());
    if (use_ != PatternUse::kJsonString || escaped.is_empty()) refuse("a character that can stand here", "none");
    std::string all;
    for (const auto& [first, last] : escaped.ranges()) {
      for (uint32_t c = first; c <= last; ++c) all += (all.empty() ? "" : "|") + literal(json_escape(c));
    }
    return "(" + all + ")";
  }

  static std::string class_of(const CodePoints& set) {
    const auto [begin, end] = set.ranges().front();
    if (set.ranges().size() == 1 && begin == end) return code_point_escape(begin);
    std::string all = "[";
    for (const auto& [first, last] : set.ranges()) {
      all += code_point_escape(first);
      if (last > first) all += "-" + code_point_escape(last);
    }
    return all + "]";
  }

  const std::string_view text_;
  const PatternUse use_;
  size_t at_ = 0;
};

}  // namespace

std::string canonical_pattern(std::string_view pattern, PatternUse use) {
  return PatternReader(pattern, use).read();
}

std::optional<std::string> find_pattern_fault(std::string_view pattern, PatternUse use) {
  if (auto excess = find_pattern_excess(pattern)) return excess;
  try {
    canonical_pattern(pattern, use);
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace tessera::text
