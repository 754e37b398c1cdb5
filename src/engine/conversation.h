// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prompt after prompt of one conversation, on one sequence state: what a prompt shares with the tokens already seen is
// not run again. docs/decisions/0011-conversation.md says how far that reaches.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/generate.h"

namespace tessera::engine {

class Conversation {
 public:
  // Room for `capacity` tokens, prompt and answer together; the state is made with the first prompt. `runner` must
  // outlive it.
  Conversation(model::Runner& runner, int64_t capacity) : runner_(&runner), capacity_(capacity) {}

  // generate() for a prompt that usually begins as the last one did. Token for token the same answer as with a fresh
  // state. Throws as generate() does, and kInvalidArgument where the prompt has no room; after an exception nothing is
  // remembered.
  GenerateResult answer(std::span<const int32_t> prompt, const GenerateOptions& options, GenerateObserver& observer,
                        ProgressSink* progress);

  // Tokens of the last prompt that were not run again.
  int64_t num_reused() const { return num_reused_; }
  // Tokens that the state has seen.
  int64_t num_tokens() const { return static_cast<int64_t>(seen_.size()); }
  int64_t capacity() const { return capacity_; }
  // Forgets everything, and gives the memory back.
  void clear();

 private:
  // A state that has seen a beginning of `prompt`, as much as is remembered and at least one token less than all.
  std::unique_ptr<model::SequenceState> take_state(std::span<const int32_t> prompt);

  model::Runner* runner_;
  int64_t capacity_;
  std::vector<int32_t> seen_;  // by state_
  std::unique_ptr<model::SequenceState> state_;
  std::vector<std::unique_ptr<model::StateMark>> marks_;  // rising positions
  int64_t num_reused_ = 0;
};

}  // namespace tessera::engine
