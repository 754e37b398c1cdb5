// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prompts and texts that `tessera eval` and `tessera perplexity` read.
#include <cstdint>
#include <string>
#include <vector>

#include "text/tokenizer/tokenizer.h"

namespace tessera::app {

struct EvalItem {
  int64_t line = 0;  // in the file, from 1
  std::string task;
  std::vector<int32_t> prompt_ids;
  std::string expected;  // without the end token
};

// One JSON object a line: `prompt_ids` (token ids), or `prompt` (the whole text; special tokens are parsed, nothing is
// added), `expected`, and `task` ("all" where absent). Other fields are ignored, empty lines skipped. Throws kDataLoss
// naming file, line and field for anything else, for ids outside [0, vocab_size), for prompts of no token or of more
// than `max_tokens`; kNotFound without the file.
std::vector<EvalItem> read_eval_file(const std::string& path, const text::Tokenizer& tokenizer, int64_t vocab_size,
                                     int64_t max_tokens);

struct ScoredText {
  std::vector<int32_t> ids;  // the first is given, the others are scored
  int64_t num_bytes = 0;     // of the scored tokens' text; 0: not known
};

// NAME.json: {"segments": [[ids], ...], "bytes": [one number a segment]}, bytes optional. Any other name: UTF-8 text,
// tokenized whole and cut into windows that open with `bos_id` and hold at most `window` tokens. Throws as above.
std::vector<ScoredText> read_scored_texts(const std::string& path, const text::Tokenizer* tokenizer, int32_t bos_id,
                                          int64_t vocab_size, int64_t window, int64_t max_tokens);

// True where read_scored_texts needs a tokenizer.
bool is_plain_text(const std::string& path);

}  // namespace tessera::app
