// SPDX-License-Identifier: Apache-2.0
#pragma once
// One stage of a pre-tokenizer: cuts a text at the matches of a regular expression; matches and the gaps between them
// both become pieces ("Isolated"). PCRE2 with JIT; the pattern is read as Hugging Face tokenizers (Oniguruma) reads it.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

// Rewrites what PCRE2 reads differently: \s is Unicode White_Space (PCRE2's also has U+180E), and \p{L}, \p{M}, \p{N},
// \p{P}, \p{S} include what newer Unicode versions added. Throws kUnsupported for a negated class inside brackets that
// can't be rewritten (\S or \P{..} there).
std::string translate_pattern(std::string_view pattern, const std::string& where);

class RegexSplit {
 public:
  // `where` names file and field. Throws kDataLoss for a pattern that does not compile, kUnsupported as above.
  RegexSplit(std::string_view pattern, const std::string& where);
  // Matches this text literally.
  static RegexSplit literal(std::string_view text, const std::string& where);
  RegexSplit(RegexSplit&&) noexcept;
  ~RegexSplit();

  // Appends the pieces of `text` (valid UTF-8) to `pieces`. It sees nothing outside `text`. Throws kUnsupported where
  // the match limit ends a hostile pattern's search. Threads may call it at once.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;
  // Whether all of `text` is one match. The same otherwise.
  bool matches(std::string_view text) const;

 private:
  struct Compiled;
  explicit RegexSplit(std::unique_ptr<Compiled> compiled);
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera::text
