// SPDX-License-Identifier: Apache-2.0
#include "engine/token_queue.h"

namespace tessera::engine {

int64_t TokenQueue::room() const {
  const std::lock_guard<std::mutex> hold(lock_);
  return capacity_ - num_tokens_;
}

void TokenQueue::push(Event event) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (std::holds_alternative<Token>(event)) ++num_tokens_;
  // The engine may be gone after a request's end. Waking under the lock keeps it here until that is done.
  if (std::holds_alternative<Outcome>(event)) engine_ = nullptr;
  events_.push_back(std::move(event));
  changed_.notify_one();
}

TokenQueue::Event TokenQueue::take() {
  Event event = std::move(events_.front());
  events_.pop_front();
  if (std::holds_alternative<Token>(event)) {
    --num_tokens_;
    // Not for every token: a request that stops and goes at each would waste steps.
    const bool has_room = num_tokens_ == capacity_ / 2 || num_tokens_ == 0;
    if (engine_ != nullptr && has_room) engine_->wake();
  }
  return event;
}

TokenQueue::Event TokenQueue::pop() {
  std::unique_lock<std::mutex> hold(lock_);
  changed_.wait(hold, [this] { return !events_.empty(); });
  return take();
}

std::optional<TokenQueue::Event> TokenQueue::pop_within(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> hold(lock_);
  if (!changed_.wait_for(hold, time, [this] { return !events_.empty(); })) return std::nullopt;
  return take();
}

std::optional<TokenQueue::Event> TokenQueue::try_pop() {
  return pop_within(std::chrono::milliseconds(0));
}

void TokenQueue::begun(int64_t num_cached_tokens) {
  push(Begun{num_cached_tokens});
}

void TokenQueue::prompt_logprobs(int64_t first_position, std::span<const Logprobs> logprobs) {
  push(PromptLogprobs{first_position, {logprobs.begin(), logprobs.end()}});
}

bool TokenQueue::token(const Token& token) {
  push(token);
  return true;
}

void TokenQueue::choice_finished(int choice, FinishReason reason) {
  push(ChoiceEnd{choice, reason});
}

void TokenQueue::finished(const Outcome& outcome) {
  push(outcome);
}

}  // namespace tessera::engine
