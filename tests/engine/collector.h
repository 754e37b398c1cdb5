// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sink for tests that keeps everything, and lets another thread wait for the end.
#include <condition_variable>
#include <mutex>

#include "engine/engine.h"

namespace tessera::engine {

class Collector final : public Sink {
 public:
  explicit Collector(int num_choices = 1) : ids(static_cast<size_t>(num_choices)) {}

  void prompt_logprobs(int64_t first_position, std::span<const Logprobs> rows) override {
    is_in_order = is_in_order && first_position == static_cast<int64_t>(prompt.size()) + 1;
    prompt.insert(prompt.end(), rows.begin(), rows.end());
  }
  bool token(const Token& token) override {
    std::vector<int32_t>& own = ids[static_cast<size_t>(token.choice)];
    own.push_back(token.id);
    if (token.logprobs) logprobs.push_back(*token.logprobs);
    if (engine != nullptr && static_cast<int64_t>(own.size()) == cancel_at) engine->cancel(id);
    return static_cast<int64_t>(own.size()) != stop_at;
  }
  void finished(const Outcome& how) override {
    const std::lock_guard<std::mutex> hold(lock_);
    outcome = how;
    ++num_ends_;
    changed_.notify_all();
  }
  // The outcome, waited for; all else may be read after it.
  const Outcome& wait() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [this] { return num_ends_ > 0; });
    return outcome;
  }
  int num_ends() {
    const std::lock_guard<std::mutex> hold(lock_);
    return num_ends_;
  }

  std::vector<std::vector<int32_t>> ids;  // by choice
  std::vector<Logprobs> logprobs, prompt;
  bool is_in_order = true;
  int64_t stop_at = -1, cancel_at = -1;  // tokens
  Engine* engine = nullptr;              // that is asked to cancel `id`, by the sink itself
  RequestId id = 0;
  Outcome outcome;

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  int num_ends_ = 0;
};

}  // namespace tessera::engine
