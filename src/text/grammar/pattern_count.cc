// SPDX-License-Identifier: Apache-2.0
// How large a regular expression is.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/strings.h"
#include "text/grammar/pattern.h"

namespace tessera::text {

namespace {

// How often a regular expression's characters come at most, nested bounds multiplied. Unbounded repetition counts once:
// it is a loop.
class PatternCount {
 public:
  explicit PatternCount(std::string_view pattern) : pattern_(pattern) {}

  // More than kMaxPatternRepeats: as many or more.
  size_t count() {
    std::vector<size_t> groups = {0};  // of the open groups, outermost first
    size_t last = 0;                   // of what a quantifier would repeat
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_++];
      if (c == '(') {
        groups.push_back(0);
        continue;
      }
      if (c == '{') {
        const size_t times = bounds();
        if (times <= 1) continue;
        groups.back() += cut((times - 1) * last);
        last = cut(last * times);
      } else if (c == ')' && groups.size() > 1) {
        last = groups.back();
        groups.pop_back();
        groups.back() += last;
      } else {
        if (c == '\\') skip_escape();
        if (c == '[') skip_class();
        last = 1;
        ++groups.back();
      }
      if (groups.back() > kMaxPatternRepeats) return groups.back();
    }
    size_t all = 0;
    for (const size_t group : groups) all += group;
    return all;
  }

 private:
  static size_t cut(size_t count) { return std::min(count, kMaxPatternRepeats + 1); }

  // "m}", "m,}" or "m,n}"; the larger one. 1 where it is none.
  size_t bounds() {
    const size_t end = has_closing_ ? pattern_.find('}', at_) : std::string_view::npos;
    has_closing_ = end != std::string_view::npos;
    if (!has_closing_) return 1;
    size_t most = 1;
    for (const std::string_view part : split(pattern_.substr(at_, end - at_), ',')) {
      size_t value = 0;
      const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), value);
      if (error == std::errc::result_out_of_range) value = kMaxPatternRepeats + 1;
      most = std::max(most, cut(value));
    }
    at_ = end + 1;
    return most;
  }

  // The braces of \u{61} are no bounds.
  void skip_escape() {
    const bool has_braces = pattern_.substr(at_).starts_with("u{");
    const size_t end = has_braces ? pattern_.find('}', at_) : at_;
    if (end != std::string_view::npos) at_ = end + 1;
  }

  void skip_class() {
    if (at_ < pattern_.size() && pattern_[at_] == '^') ++at_;
    for (bool is_first = true; at_ < pattern_.size() && (is_first || pattern_[at_] != ']'); is_first = false) {
      at_ += pattern_[at_] == '\\' ? 2 : 1;
    }
    at_ = std::min(at_ + 1, pattern_.size());
  }

  std::string_view pattern_;
  size_t at_ = 0;
  bool has_closing_ = true;  // a '}' may follow
};

}  // namespace

std::optional<std::string> find_pattern_excess(std::string_view pattern) {
  if (PatternCount(pattern).count() <= kMaxPatternRepeats) return std::nullopt;
  return fmt::format("expected a regular expression of at most {} characters, repeated ones counted, found more",
                     kMaxPatternRepeats);
}

}  // namespace tessera::text
