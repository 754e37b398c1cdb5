// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <chrono>
#include <cmath>

namespace tessera::engine {

double Engine::SteadyClock::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Engine::Engine(model::Runner& runner, const CacheBudget& budget, const EngineOptions& options)
    : room_(options.waiting), loop_(runner, budget, room_, clock_, options.steps), thread_([this] { work(); }) {}

Engine::~Engine() {
  drain(0);
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::optional<Refusal> Engine::closed() const {
  if (!is_draining_) return std::nullopt;
  return Refusal{.reason = Refusal::Reason::kDraining, .message = "shutting down: no more requests are taken"};
}

std::variant<RequestId, Refusal> Engine::submit(Request request, std::shared_ptr<Sink> sink) {
  if (std::optional<Refusal> refused = loop_.find_refusal(request)) return std::move(*refused);
  RequestId id = 0;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (std::optional<Refusal> refused = closed()) return std::move(*refused);
    if (auto refused = room_.enter(static_cast<int64_t>(request.prompt.size()))) return std::move(*refused);
    id = ++last_id_;
    submitted_.push_back({id, std::move(request), std::move(sink)});
  }
  changed_.notify_one();
  return id;
}

std::optional<Refusal> Engine::check_room(int64_t num_prompt_tokens) const {
  const std::lock_guard<std::mutex> hold(lock_);
  if (std::optional<Refusal> refused = closed()) return refused;
  return room_.check(num_prompt_tokens);
}

void Engine::cancel(RequestId id) {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    cancelled_.push_back(id);
  }
  changed_.notify_one();
}

void Engine::wake() {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_woken_ = true;
  }
  changed_.notify_one();
}

bool Engine::drain(double seconds) {
  std::unique_lock<std::mutex> hold(lock_);
  is_draining_ = true;
  const auto is_done = [this] { return is_idle_ && submitted_.empty(); };
  // Longer than a year is for ever: a time point must hold it.
  const std::chrono::duration<double> limit(std::min(std::max(seconds, 0.0), 3e7));
  if (finished_.wait_for(hold, limit, is_done)) return true;
  cancels_all_ = true;
  changed_.notify_one();
  finished_.wait(hold, is_done);
  return false;
}

Engine::Status Engine::status() const {
  const std::lock_guard<std::mutex> hold(lock_);
  Status status = status_;
  status.is_draining = is_draining_;
  return status;
}

// What other threads asked for since the last step. False: nothing.
bool Engine::take_inbox() {
  std::vector<Submitted> submitted;
  std::vector<RequestId> cancelled;
  bool cancels_all = false, is_woken = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    submitted.swap(submitted_);
    cancelled.swap(cancelled_);
    std::swap(cancels_all, cancels_all_);
    std::swap(is_woken, is_woken_);
    is_idle_ = is_idle_ && submitted.empty();
  }
  for (Submitted& one : submitted) loop_.accept(one.id, std::move(one.request), std::move(one.sink));
  for (const RequestId id : cancelled) loop_.cancel(id, "");
  if (cancels_all) loop_.cancel_all("shutting down");
  return is_woken || cancels_all || !submitted.empty() || !cancelled.empty();
}

void Engine::publish(const std::string& fault) {
  const std::lock_guard<std::mutex> hold(lock_);
  status_.last_step = loop_.last_step();
  status_.totals = loop_.totals();
  if (!fault.empty()) status_.fault = fault;
  is_idle_ = loop_.is_idle();
  if (is_idle_) finished_.notify_all();
}

void Engine::work() {
  for (;;) {
    bool is_busy = true;
    try {
      const bool has_news = take_inbox();
      is_busy = loop_.step() || has_news;
      publish("");
    } catch (const std::exception& error) {
      loop_.abandon(error.what());
      publish(error.what());
    }
    if (is_busy) continue;
    std::unique_lock<std::mutex> hold(lock_);
    const auto has_news = [this] {
      return is_ending_ || is_woken_ || cancels_all_ || !submitted_.empty() || !cancelled_.empty();
    };
    const double deadline = loop_.next_deadline();
    if (std::isinf(deadline)) {
      changed_.wait(hold, has_news);
    } else {
      changed_.wait_for(hold, std::chrono::duration<double>(std::max(0.0, deadline - clock_.now())), has_news);
    }
    if (is_ending_) return;
  }
}

}  // namespace tessera::engine
