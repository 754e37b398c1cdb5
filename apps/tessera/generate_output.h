// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `tessera generate` does with tokens and logits as they come.
#include <memory>
#include <string>
#include <vector>

#include "engine/generate.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"

namespace tessera::app {

// Streams text to stdout (unless collecting for JSON), ends the sequence at a stop string, keeps logits if asked.
class GenerateOutput final : public engine::GenerateObserver {
 public:
  struct Options {
    bool streams_text = true;
    bool keeps_logits = false;
    std::vector<std::string> stops;
    std::vector<int32_t> end_ids;  // never shown as text
  };

  // `tokenizer` null: ids are streamed instead of text.
  GenerateOutput(const text::Tokenizer* tokenizer, Options options);

  bool wants_logits() const override { return options_.keeps_logits; }
  void logits(int64_t first_position, std::span<const float> rows) override;
  bool token(int32_t id) override;
  // Flushes what was held back, and ends the line.
  void finish();

  const std::string& text() const { return text_; }
  bool is_broken_pipe() const { return is_broken_pipe_; }
  // FP32 rows, one per position that was run, in order.
  std::vector<float>& kept_logits() { return kept_logits_; }

 private:
  void emit(const std::string& text);

  const text::Tokenizer* tokenizer_;
  Options options_;
  std::unique_ptr<text::Detokenizer> detokenizer_;
  text::StopMatcher stops_;
  std::string text_;
  std::vector<float> kept_logits_;
  bool has_tokens_ = false, is_broken_pipe_ = false;
};

}  // namespace tessera::app
