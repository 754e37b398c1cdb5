// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sink for who wants to wait for tokens on a thread of its own. It holds at most so many tokens; when it is full the
// request pauses until some are taken, and no token is lost.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <variant>

#include "engine/engine.h"

namespace tessera::engine {

class TokenQueue final : public Sink {
 public:
  struct Begun {
    int64_t num_cached_tokens = 0;
  };
  struct PromptLogprobs {
    int64_t first_position = 0;
    std::vector<Logprobs> logprobs;
  };
  struct ChoiceEnd {
    int choice = 0;
    FinishReason reason = FinishReason::kNone;
  };
  using Event = std::variant<Begun, Token, PromptLogprobs, ChoiceEnd, Outcome>;

  // `capacity` tokens: at least the request's choices, else it could never go on. `engine` must outlive the request;
  // null: nobody is woken.
  TokenQueue(int64_t capacity, Wakeable* engine) : capacity_(capacity), engine_(engine) {}

  // The next event, waited for; an Outcome is the last one, after it there are none.
  Event pop();
  // The same, waited for at most so long; nothing where nothing came.
  std::optional<Event> pop_within(std::chrono::milliseconds time);
  // The same without waiting.
  std::optional<Event> try_pop();

  int64_t room() const override;
  void begun(int64_t num_cached_tokens) override;
  void prompt_logprobs(int64_t first_position, std::span<const Logprobs> logprobs) override;
  bool token(const Token& token) override;
  void choice_finished(int choice, FinishReason reason) override;
  void finished(const Outcome& outcome) override;

 private:
  void push(Event event);
  Event take();

  const int64_t capacity_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  int64_t num_tokens_ = 0;  // among the events
  Wakeable* engine_;        // null once the request has ended
};

}  // namespace tessera::engine
