// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens back to text, as they come: what is returned is always whole UTF-8.
#include <cstdint>
#include <string>

#include "text/tokenizer/tokenizer.h"
#include "text/utf8_joiner.h"

namespace tessera::text {

class Detokenizer {
 public:
  enum class Special { kSkip, kKeep };

  // `tokenizer` must outlive it.
  Detokenizer(const Tokenizer& tokenizer, Special special) : tokenizer_(&tokenizer), special_(special) {}

  // The text that this token completes; bytes of an unfinished UTF-8 sequence wait for the next one. An id without a
  // token gives nothing.
  std::string push(int32_t id);
  // What still waits, as U+FFFD.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  Special special_;
  Utf8Joiner joiner_;
};

}  // namespace tessera::text
