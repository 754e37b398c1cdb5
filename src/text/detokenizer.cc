// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

#include "base/strings.h"

namespace tessera::text {

std::string Detokenizer::push(int32_t id) {
  if (id < 0 || id >= tokenizer_->vocab_size()) return "";
  if (special_ == Special::kSkip && tokenizer_->is_special(id)) return "";
  pending_ += tokenizer_->token_bytes(id);
  const size_t complete = complete_utf8_prefix(pending_);
  std::string text = replace_invalid_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string Detokenizer::finish() {
  std::string text = replace_invalid_utf8(pending_);
  pending_.clear();
  return text;
}

}  // namespace tessera::text
