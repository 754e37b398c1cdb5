// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/deepseek_split.h"

#include "base/strings.h"

namespace tessera::text {

namespace {

constexpr std::string_view kDigit = "\\p{N}", kDigits = "\\p{N}{1,3}";
constexpr std::string_view kHan = "[一-龥぀-ゟ゠-ヿ]+";
constexpr std::string_view kWords =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

// Bits of a class. What is neither of these may only stand before a word.
constexpr uint8_t kLetter = 1, kMark = 2, kNumber = 4, kPunctuation = 8, kSymbol = 16, kSpace = 32, kIsHan = 64;
constexpr uint8_t kInWord = kLetter | kMark, kSigns = kPunctuation | kSymbol;
constexpr size_t kNone = std::string_view::npos;

bool is_line_end(char c) {
  return c == '\r' || c == '\n';
}
bool is_ascii_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_ascii_sign(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

// Files write line ends as escapes or as they are.
std::string with_escapes(std::string_view pattern) {
  std::string out;
  for (const char c : pattern) {
    if (is_line_end(c)) out += '\\';
    out += c == '\r' ? 'r' : c == '\n' ? 'n' : c;
  }
  return out;
}

size_t end_of_line_ends(std::string_view text, size_t position) {
  while (position < text.size() && is_line_end(text[position])) ++position;
  return position;
}

}  // namespace

std::unique_ptr<DeepSeekSplit> DeepSeekSplit::find(std::span<const std::string> patterns, const std::string& where) {
  if (patterns.size() != 3 || patterns[1] != kHan || with_escapes(patterns[2]) != kWords) return nullptr;
  if (patterns[0] != kDigit && patterns[0] != kDigits) return nullptr;
  return std::unique_ptr<DeepSeekSplit>(new DeepSeekSplit(patterns[0] == kDigit ? 1 : 3, where));
}

DeepSeekSplit::DeepSeekSplit(int most_digits, const std::string& where)
    : most_digits_(most_digits),
      classes_({"\\p{L}", "\\p{M}", "\\p{N}", "\\p{P}", "\\p{S}", "\\s", std::string(kHan)}, where) {}

uint8_t DeepSeekSplit::class_at(std::string_view text, size_t& position) const {
  const unsigned char byte = static_cast<unsigned char>(text[position]);
  if (byte >= 0x80) return classes_.of(next_code_point(text, position));
  ++position;
  return classes_.of(byte);
}

size_t DeepSeekSplit::end_of_run(std::string_view text, size_t position, uint8_t classes) const {
  while (position < text.size()) {
    size_t next = position;
    if ((class_at(text, next) & classes) == 0) break;
    position = next;
  }
  return position;
}

// Numbers, runs of Han and kana, and what is between: no later split sees more than one of these.
void DeepSeekSplit::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  constexpr uint8_t kKinds = kNumber | kIsHan;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    const uint8_t kind = class_at(text, end) & kKinds;
    for (int count = 1; end < text.size() && (kind != kNumber || count < most_digits_); ++count) {
      size_t next = end;
      if ((class_at(text, next) & kKinds) != kind) break;
      end = next;
    }
    const std::string_view piece = text.substr(begin, end - begin);
    // The words' expression matches no number.
    if (kind == kNumber) {
      pieces.push_back(piece);
    } else {
      split_words(piece, pieces);
    }
    begin = end;
  }
}

void DeepSeekSplit::split_words(std::string_view text, std::vector<std::string_view>& pieces) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = match(text, at);
    if (end == kNone) {  // nothing begins here
      class_at(text, at);
      continue;
    }
    if (at > done) pieces.push_back(text.substr(done, at - done));
    pieces.push_back(text.substr(at, end - at));
    done = at = end;
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
}

// Where the match ends that begins here, alternative by alternative as the expression has them.
size_t DeepSeekSplit::match(std::string_view text, size_t begin) const {
  const char first = text[begin];
  size_t second = begin;
  const uint8_t kind = class_at(text, second);
  const bool has_second = second < text.size();
  size_t third = second;
  const uint8_t next_kind = has_second ? class_at(text, third) : 0;
  if (is_ascii_sign(first) && has_second && is_ascii_letter(text[second])) {
    size_t end = second;
    while (end < text.size() && is_ascii_letter(text[end])) ++end;
    return end;
  }
  const bool may_lead = !is_line_end(first) && (kind & (kLetter | kSigns)) == 0;
  if ((kind & kInWord) != 0 || (may_lead && (next_kind & kInWord) != 0)) return end_of_run(text, second, kInWord);
  if ((kind & kSigns) != 0 || (first == ' ' && (next_kind & kSigns) != 0)) {
    return end_of_line_ends(text, end_of_run(text, second, kSigns));
  }
  if ((kind & kSpace) == 0) return kNone;
  // Spaces: to the last line end among them; or all but the last, which goes with what follows; or that one.
  size_t end = begin, last = begin, end_of_lines = kNone;
  while (end < text.size()) {
    size_t next = end;
    if ((class_at(text, next) & kSpace) == 0) break;
    if (is_line_end(text[end])) end_of_lines = next;
    last = end;
    end = next;
  }
  if (end_of_lines != kNone) return end_of_lines;
  return end == text.size() || last == begin ? end : last;
}

}  // namespace tessera::text
