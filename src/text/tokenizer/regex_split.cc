// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/regex_split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <new>
#include <span>

#include "base/error.h"
#include "base/strings.h"
#include "text/tokenizer/unicode_additions.h"

namespace tessera::text {

namespace {

// Far above what the tokenizers' patterns need; a pattern that backtracks without end stops here.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;

constexpr std::string_view kWhiteSpace =
    "\\x09-\\x0D\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}";

std::span<const CodePointRange> additions_of(char category) {
  switch (category) {
    case 'L':
      return kLetters;
    case 'M':
      return kMarks;
    case 'N':
      return kNumbers;
    case 'P':
      return kPunctuation;
    case 'S':
      return kSymbols;
    default:
      return {};
  }
}

// What stands inside brackets for \p{category}.
std::string class_content(char category) {
  std::string out = fmt::format("\\p{{{}}}", category);
  for (const CodePointRange& range : additions_of(category)) {
    out += fmt::format("\\x{{{:X}}}-\\x{{{:X}}}", range.first, range.last);
  }
  return out;
}

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& where) {
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[i + 1];
      const bool is_property = (next == 'p' || next == 'P') && i + 4 < pattern.size() && pattern[i + 2] == '{' &&
                               pattern[i + 4] == '}' && !additions_of(pattern[i + 3]).empty();
      const bool is_negated = next == 'S' || (is_property && next == 'P');
      if (!is_property && next != 's' && next != 'S') {
        out.append(pattern.substr(i, 2));
        ++i;
        continue;
      }
      if (is_negated && in_class) {
        fail(ErrorCode::kUnsupported,
             fmt::format("{}: a negated class inside brackets, in {}", where, printable(pattern)));
      }
      const std::string content = is_property ? class_content(pattern[i + 3]) : std::string(kWhiteSpace);
      out += in_class ? content : fmt::format("[{}{}]", is_negated ? "^" : "", content);
      i += is_property ? 4 : 1;
      continue;
    }
    if (!in_class && c == '[') {
      in_class = true;
      class_begin = i + 1 < pattern.size() && pattern[i + 1] == '^' ? i + 2 : i + 1;
    } else if (in_class && c == ']' && i != class_begin) {
      in_class = false;
    }
    out.push_back(c);
  }
  return out;
}

struct RegexSplit::Compiled {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  std::string where;

  ~Compiled() {
    pcre2_code_free(code);
    pcre2_match_context_free(context);
  }
};

namespace {

std::string pcre_message(int error) {
  PCRE2_UCHAR buffer[160];
  pcre2_get_error_message(error, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct MatchDataFree {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

RegexSplit::RegexSplit(std::unique_ptr<Compiled> compiled) : compiled_(std::move(compiled)) {}
RegexSplit::RegexSplit(RegexSplit&&) noexcept = default;
RegexSplit::~RegexSplit() = default;

RegexSplit::RegexSplit(std::string_view pattern, const std::string& where) : compiled_(std::make_unique<Compiled>()) {
  const std::string translated = translate_pattern(pattern, where);
  int error = 0;
  PCRE2_SIZE offset = 0;
  compiled_->where = where;
  compiled_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (compiled_->code == nullptr) {
    fail_data(where, "regular expression", "a valid pattern",
              fmt::format("{} in {}", pcre_message(error), printable(pattern, 120)));
  }
  // Without JIT support matching is slower and the same.
  (void)pcre2_jit_compile(compiled_->code, PCRE2_JIT_COMPLETE);
  compiled_->context = pcre2_match_context_create(nullptr);
  if (compiled_->context == nullptr) throw std::bad_alloc();
  pcre2_set_match_limit(compiled_->context, kMatchLimit);
  pcre2_set_heap_limit(compiled_->context, kHeapLimitKib);
}

RegexSplit RegexSplit::literal(std::string_view text, const std::string& where) {
  std::string pattern;
  for (const char c : text) {
    // Every ASCII sign may be escaped; letters, digits and UTF-8 bytes stand for themselves.
    const unsigned char byte = static_cast<unsigned char>(c);
    const bool is_plain =
        byte >= 0x80 || (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
    if (byte < 0x20) {
      pattern += fmt::format("\\x{:02X}", byte);
    } else {
      pattern += is_plain ? std::string(1, c) : std::string("\\") + c;
    }
  }
  return RegexSplit(pattern, where);
}

void RegexSplit::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  const std::unique_ptr<pcre2_match_data, MatchDataFree> data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) throw std::bad_alloc();
  size_t done = 0, from = 0;
  while (from < text.size()) {
    const int found = pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, data.get(), compiled_->context);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      fail(ErrorCode::kUnsupported, fmt::format("{}: the pre-tokenizer's regular expression gave up: {}",
                                                compiled_->where, pcre_message(found)));
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
    const size_t begin = bounds[0], end = bounds[1];
    if (end <= begin) {  // an empty match cuts nothing
      from = begin;
      next_code_point(text, from);
      continue;
    }
    if (begin > done) pieces.push_back(text.substr(done, begin - done));
    pieces.push_back(text.substr(begin, end - begin));
    done = from = end;
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
}

bool RegexSplit::matches(std::string_view text) const {
  const std::unique_ptr<pcre2_match_data, MatchDataFree> data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) throw std::bad_alloc();
  const int found = pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                                PCRE2_NO_UTF_CHECK, data.get(), compiled_->context);
  if (found < 0) return false;
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
  return bounds[0] == 0 && bounds[1] == text.size();
}

}  // namespace tessera::text
