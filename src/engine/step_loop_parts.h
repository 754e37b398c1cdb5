// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the step loop knows of its requests, for its own files alone.
#include <exception>
#include <memory>
#include <vector>

#include "engine/step_loop.h"

namespace tessera::engine {

// Choice i of a request has the key id * kKeysPerRequest + i.
inline constexpr uint64_t kKeysPerRequest = kMaxChoices;

// So short that a string holds it without memory of its own.
inline constexpr char kOutOfMemory[] = "out of memory";

ErrorCode code_of(const std::exception& error);
// Of one choice.
Sampler sampler_of(const Request& request, uint64_t choice, int32_t vocab_size);

// One sequence of a request.
struct StepLoop::Choice {
  SequenceKey key;
  int index;
  std::vector<int32_t> ids;  // prompt and drawn
  Sampler sampler;
  std::unique_ptr<model::SequenceState> state{};  // while it runs
  std::vector<uint8_t> saved{};                   // while it is preempted, if it was swapped
  std::unique_ptr<TokenConstraint> constraint{};  // null: none
  std::vector<uint32_t> mask{};                   // of the token to draw; empty: all
  bool is_open = true;
};

struct StepLoop::Live {
  RequestId id;
  std::shared_ptr<const Request> asked;  // never null
  std::shared_ptr<Sink> sink;
  int64_t capacity;
  double submitted;
  const Request& request = *asked;
  std::vector<std::unique_ptr<Choice>> choices{};  // the first alone until the prompt has run
  int64_t num_open = 0;                            // choices that have not ended, those to come included
  int64_t num_scored = 0;                          // prompt tokens after the first whose logprobs were delivered
  bool has_begun = false, has_looked_up = false;   // admitted once; had a state once
  double paused_since = -1;                        // below 0: it is not
  Outcome outcome{};

  int64_t num_prompt() const { return static_cast<int64_t>(request.prompt.size()); }
  // Of a choice that need not be asked: its constraint's or, without one, the request's.
  std::span<const uint32_t> shared_mask(const Choice& choice) const {
    if (choice.constraint != nullptr) return choice.constraint->shared_mask();
    if (request.allowed == nullptr) return {};
    return *request.allowed;
  }
  bool draws() const { return capacity > num_prompt(); }
};

struct StepLoop::Running {
  SequenceKey key;
  int64_t first, count;  // positions
  bool is_last;          // all of its tokens have run after the slice
  bool is_decode;        // a token that was drawn
  model::LogitRows rows;
  const model::Draw* draw;  // null: none, or the step can't make it
  int64_t num_rows() const { return rows == model::LogitRows::kAll ? count : rows == model::LogitRows::kLast ? 1 : 0; }
};

// The state of a choice that ended while the step ahead was queued, which runs it once more.
struct StepLoop::Leaving {
  std::shared_ptr<const Request> request;
  std::vector<int32_t> ids;  // that were delivered
  std::unique_ptr<model::SequenceState> state;
  int64_t num_tokens;  // that it will have seen: those, and one more where what a step drew was not taken
  bool is_offered;     // to the prefix store
};

// A new state, for which prefixes make room.
template <class Make>
std::unique_ptr<model::SequenceState> StepLoop::make_with_room(const Make& make) {
  for (;;) {
    try {
      return make();
    } catch (const std::exception& error) {
      if (code_of(error) != ErrorCode::kResourceExhausted || !give_up_prefix()) throw;
    }
  }
}

}  // namespace tessera::engine
