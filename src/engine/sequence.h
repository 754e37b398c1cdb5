// SPDX-License-Identifier: Apache-2.0
#pragma once
// One request on its way through the model: its tokens, its state, and why it ended.
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "model/runner.h"

namespace tessera::engine {

enum class FinishReason {
  kNone,
  kEndOfText,  // the model said an end token
  kStop,       // the caller saw a stop string
  kLength,     // max_tokens, or the model's longest sequence
  kCancelled,
  kFailed,  // an error ended it
};

// "stop", "length", "cancelled" or "failed": the words of the OpenAI API where it has one.
std::string_view to_string(FinishReason reason);

class Sequence {
 public:
  Sequence(std::vector<int32_t> prompt, std::unique_ptr<model::SequenceState> state)
      : ids_(std::move(prompt)), num_prompt_(ids_.size()), state_(std::move(state)) {}

  std::span<const int32_t> prompt() const { return std::span(ids_).first(num_prompt_); }
  std::span<const int32_t> ids() const { return ids_; }  // prompt and generated
  std::span<const int32_t> generated() const { return std::span(ids_).subspan(num_prompt_); }
  // Tokens that the model has not seen yet.
  std::span<const int32_t> pending() const { return std::span(ids_).subspan(static_cast<size_t>(state_->position())); }
  // Position of the next token to draw.
  int64_t next_position() const { return static_cast<int64_t>(ids_.size()); }
  void append(int32_t id) { ids_.push_back(id); }
  model::SequenceState& state() { return *state_; }
  // Gives the state away; the sequence can't run after it.
  std::unique_ptr<model::SequenceState> take_state() { return std::move(state_); }
  FinishReason finish_reason() const { return finish_reason_; }
  void finish(FinishReason reason) { finish_reason_ = reason; }

 private:
  std::vector<int32_t> ids_;
  size_t num_prompt_;
  std::unique_ptr<model::SequenceState> state_;
  FinishReason finish_reason_ = FinishReason::kNone;
};

}  // namespace tessera::engine
