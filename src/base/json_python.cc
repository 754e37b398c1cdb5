// SPDX-License-Identifier: Apache-2.0
// The reader with the rules of Python's json module, and the exact one for requests. The strict reader's parser cannot
// do it: it has no integers above 64 bits and no NaN.
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera {

namespace {

// Where the two readers differ.
struct Rules {
  bool is_python;                          // NaN, infinities and keys that come twice are read
  size_t max_depth, max_values, max_keys;  // keys: of one object
};

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
constexpr Rules kPythonRules{true, 512, kNoLimit, kNoLimit};
constexpr size_t kMaxDigits = 4300;  // sys.int_info.default_max_str_digits

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// A double from a number that is well-formed JSON. Out of range is infinity or zero, as with strtod, but without its
// locale.
double to_double(std::string_view text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc::result_out_of_range) return value;
  // Where the first significant digit stands, counted from the decimal point, decides between the two.
  const bool is_negative = text.front() == '-';
  const size_t mark = std::min(text.find_first_of("eE"), text.size());
  const std::string_view digits = text.substr(is_negative, mark - is_negative);
  const int64_t point = static_cast<int64_t>(std::min(digits.find('.'), digits.size()));
  const int64_t first = static_cast<int64_t>(std::min(digits.find_first_of("123456789"), digits.size()));
  int64_t exponent = 0;
  if (mark < text.size()) {
    const bool is_small = text[mark + 1] == '-';
    for (const char c : text.substr(mark + 1)) {
      if (is_digit(c)) exponent = std::min<int64_t>(exponent * 10 + (c - '0'), int64_t{1} << 50);
    }
    if (is_small) exponent = -exponent;
  }
  const double magnitude = point - first + exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
  return is_negative ? -magnitude : magnitude;
}

}  // namespace

class PythonJsonReader {
 public:
  PythonJsonReader(std::string_view text, std::string_view where, const Rules& rules)
      : text_(text), where_(where), rules_(rules) {}

  Json read_document() {
    Json out = read_value();
    skip_space();
    if (pos_ != text_.size()) fail_here("the end of the text");
    return out;
  }

 private:
  struct Step {
    std::string key;
    size_t index = 0;
    bool is_index = false;
  };

  [[noreturn]] void fail_here(std::string_view expected) const {
    std::string path;
    for (const Step& step : steps_) {
      if (step.is_index) {
        path += fmt::format("[{}]", step.index);
      } else {
        path += (path.empty() ? "" : ".") + step.key;
      }
    }
    const std::string found =
        pos_ < text_.size() ? fmt::format("\"{}\"", printable(text_.substr(pos_, 20), 20)) : std::string("the end");
    fail_data(where_, path.empty() ? fmt::format("byte {}", pos_) : fmt::format("field {}, byte {}", path, pos_),
              expected, found);
  }

  void skip_space() {
    while (pos_ < text_.size() && std::string_view(" \t\n\r").find(text_[pos_]) != std::string_view::npos) ++pos_;
  }

  bool take(std::string_view word) {
    if (!text_.substr(pos_).starts_with(word)) return false;
    pos_ += word.size();
    return true;
  }

  Json read_value() {
    skip_space();
    if (++num_values_ > rules_.max_values) fail_here(fmt::format("at most {} values", rules_.max_values));
    Json out;
    if (take("null")) return out;
    if (take("{")) return read_object();
    if (take("[")) return read_array();
    if (take("\"")) {
      out.value_ = read_string();
    } else if (take("true")) {
      out.value_ = true;
    } else if (take("false")) {
      out.value_ = false;
    } else if (rules_.is_python && take("NaN")) {
      out.value_ = std::numeric_limits<double>::quiet_NaN();
    } else if (rules_.is_python && take("Infinity")) {
      out.value_ = std::numeric_limits<double>::infinity();
    } else if (rules_.is_python && take("-Infinity")) {
      out.value_ = -std::numeric_limits<double>::infinity();
    } else {
      return read_number();
    }
    return out;
  }

  void skip_digits() {
    if (pos_ == text_.size() || !is_digit(text_[pos_])) fail_here(pos_ == start_ ? "a JSON value" : "a digit");
    while (pos_ < text_.size() && is_digit(text_[pos_])) ++pos_;
  }

  Json read_number() {
    Json out;
    start_ = pos_;
    const bool is_negative = take("-");
    const size_t first = pos_;
    if (!take("0")) skip_digits();
    const size_t num_digits = pos_ - first;
    bool is_whole = true;
    if (pos_ < text_.size() && text_[pos_] == '.') {
      is_whole = false;
      ++pos_;
      skip_digits();
    }
    if (pos_ < text_.size() && (text_[pos_] == 'e' || text_[pos_] == 'E')) {
      is_whole = false;
      ++pos_;
      if (!take("-")) take("+");
      skip_digits();
    }
    const std::string_view number = text_.substr(start_, pos_ - start_);
    if (!is_whole) {
      const double value = to_double(number);
      if (!rules_.is_python && std::isinf(value)) {
        pos_ = start_;
        fail_here("a number that a double holds");
      }
      out.value_ = value;
      return out;
    }
    if (num_digits > kMaxDigits) {
      pos_ = start_;
      fail_here(fmt::format("an integer of at most {} digits", kMaxDigits));
    }
    int64_t value = 0;
    if (std::from_chars(number.data(), number.data() + number.size(), value).ec == std::errc()) {
      out.value_ = value;
    } else {
      out.value_ = Json::BigInteger{std::string(is_negative ? "-" : "") + std::string(text_.substr(first, num_digits))};
    }
    return out;
  }

  // Four hexadecimal digits at pos_.
  uint32_t read_code_unit() {
    uint32_t unit = 0;
    const char* begin = text_.data() + pos_;
    const size_t left = text_.size() - pos_;
    if (left < 4 || std::from_chars(begin, begin + 4, unit, 16).ptr != begin + 4) fail_here("four hexadecimal digits");
    pos_ += 4;
    return unit;
  }

  void read_escape(std::string& out) {
    static constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (pos_ == text_.size()) fail_here("an escape");
    const size_t which = kLetters.find(text_[pos_]);
    if (which != std::string_view::npos) {
      out += kMeanings[which];
      ++pos_;
      return;
    }
    const size_t begin = pos_;
    if (!take("u")) fail_here("an escape");
    uint32_t code_point = read_code_unit();
    if (code_point >= 0xD800 && code_point < 0xDC00 && take("\\u")) {
      const uint32_t low = read_code_unit();
      if (low >= 0xDC00 && low < 0xE000) code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code_point >= 0xD800 && code_point < 0xE000) {
      pos_ = begin;
      fail_here("a surrogate with its other half");
    }
    append_utf8(out, code_point);
  }

  // The rest of a string whose opening quote is read.
  std::string read_string() {
    std::string out;
    const size_t begin = pos_;
    while (true) {
      size_t stop = pos_;
      while (stop < text_.size() && static_cast<unsigned char>(text_[stop]) >= 0x20 && text_[stop] != '"' &&
             text_[stop] != '\\') {
        ++stop;
      }
      out.append(text_.substr(pos_, stop - pos_));
      pos_ = stop;
      if (take("\"")) break;
      if (!take("\\")) fail_here(pos_ == text_.size() ? "the string's closing quote" : "an escaped control character");
      read_escape(out);
    }
    if (!is_valid_utf8(out)) {
      pos_ = begin;
      fail_here("a string in UTF-8");
    }
    return out;
  }

  void enter() {
    if (steps_.size() == rules_.max_depth) fail_here(fmt::format("at most {} levels of nesting", rules_.max_depth));
    steps_.emplace_back();
  }

  Json read_array() {
    std::vector<Json> items;
    enter();
    steps_.back().is_index = true;
    skip_space();
    if (!take("]")) {
      while (true) {
        items.push_back(read_value());
        ++steps_.back().index;
        skip_space();
        if (take("]")) break;
        if (!take(",")) fail_here("a comma or ]");
      }
    }
    steps_.pop_back();
    Json out;
    out.value_ = std::move(items);
    return out;
  }

  Json read_object() {
    std::vector<Json::Member> members;
    enter();
    std::unordered_map<std::string, size_t> places;
    skip_space();
    if (!take("}")) {
      while (true) {
        skip_space();
        if (members.size() == rules_.max_keys) fail_here(fmt::format("at most {} keys", rules_.max_keys));
        if (!take("\"")) fail_here("a key in quotes");
        steps_.back().key = read_string();
        skip_space();
        if (!take(":")) fail_here("a colon");
        const auto [place, is_new] = places.emplace(steps_.back().key, members.size());
        if (!is_new && !rules_.is_python) fail_here("every key once");
        const size_t at = place->second;
        Json value = read_value();
        if (is_new) {
          members.emplace_back(steps_.back().key, std::move(value));
        } else {
          members[at].second = std::move(value);
        }
        skip_space();
        if (take("}")) break;
        if (!take(",")) fail_here("a comma or }");
      }
    }
    steps_.pop_back();
    Json out;
    out.value_ = std::move(members);
    return out;
  }

  std::string_view text_, where_;
  Rules rules_;
  size_t pos_ = 0, start_ = 0, num_values_ = 0;
  std::vector<Step> steps_;
};

Json Json::parse_python(std::string_view text, std::string_view where) {
  return PythonJsonReader(text, where, kPythonRules).read_document();
}

Json Json::parse_exact(std::string_view text, std::string_view where, size_t max_values) {
  return PythonJsonReader(text, where, {false, kMaxDepth, max_values, kMaxKeys}).read_document();
}

}  // namespace tessera
