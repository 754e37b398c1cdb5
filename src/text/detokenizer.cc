// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

namespace tessera::text {

std::string Detokenizer::push(int32_t id) {
  if (id < 0 || id >= tokenizer_->vocab_size()) return "";
  if (special_ == Special::kSkip && tokenizer_->is_special(id)) return "";
  return joiner_.push(tokenizer_->token_bytes(id));
}

std::string Detokenizer::finish() {
  return joiner_.finish();
}

}  // namespace tessera::text
