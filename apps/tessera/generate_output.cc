// SPDX-License-Identifier: Apache-2.0
#include "generate_output.h"

#include <algorithm>

#include "console.h"

namespace tessera::app {

GenerateOutput::GenerateOutput(const text::Tokenizer* tokenizer, Options options)
    : tokenizer_(tokenizer), options_(std::move(options)), stops_(options_.stops) {
  if (tokenizer_ != nullptr) {
    detokenizer_ = std::make_unique<text::Detokenizer>(*tokenizer_, text::Detokenizer::Special::kSkip);
  }
}

void GenerateOutput::logits(int64_t, std::span<const float> rows) {
  if (options_.keeps_logits) kept_logits_.insert(kept_logits_.end(), rows.begin(), rows.end());
}

void GenerateOutput::emit(const std::string& text) {
  text_ += text;
  if (options_.streams_text && !text.empty() && !print_result(text)) is_broken_pipe_ = true;
}

bool GenerateOutput::token(int32_t id) {
  has_tokens_ = true;
  if (std::find(options_.end_ids.begin(), options_.end_ids.end(), id) != options_.end_ids.end()) return true;
  if (tokenizer_ == nullptr) {
    emit((text_.empty() ? "" : ",") + std::to_string(id));
  } else {
    emit(stops_.push(detokenizer_->push(id)));
  }
  return !stops_.has_matched() && !is_broken_pipe_;
}

void GenerateOutput::finish() {
  if (tokenizer_ != nullptr) {
    emit(stops_.push(detokenizer_->finish()));
    emit(stops_.finish());
  }
  if (options_.streams_text && has_tokens_) print_result("\n");
}

}  // namespace tessera::app
