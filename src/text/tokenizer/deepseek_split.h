// SPDX-License-Identifier: Apache-2.0
#pragma once
// The three splits of DeepSeek's tokenizers in one pass, without a regular expression's backtracking. Held against
// those expressions, stage by stage, by the tests.
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/code_point_classes.h"

namespace tessera::text {

class DeepSeekSplit {
 public:
  // Nothing where `patterns`, one after the other, are not the ones that this does.
  static std::unique_ptr<DeepSeekSplit> find(std::span<const std::string> patterns, const std::string& where);

  // Appends the pieces of `text` (valid UTF-8) to `pieces`. Threads may call it at once.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  DeepSeekSplit(int most_digits, const std::string& where);
  void split_words(std::string_view text, std::vector<std::string_view>& pieces) const;
  size_t match(std::string_view text, size_t begin) const;
  uint8_t class_at(std::string_view text, size_t& position) const;
  size_t end_of_run(std::string_view text, size_t position, uint8_t classes) const;

  const int most_digits_;  // numbers in one piece
  const CodePointClasses classes_;
};

}  // namespace tessera::text
