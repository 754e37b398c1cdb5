// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/step_loop_parts.h"

namespace tessera::engine {

namespace {

// So often in a row want of memory may end all requests of the moment before it is called a fault of the engine.
constexpr int kMostShortTurns = 8;
// So many requests in a row a device may fail before it is called lost: one may be a request's own doing, and after an
// error that CUDA does not forget every call fails.
constexpr int kMostDeviceFailures = 3;
constexpr std::string_view kDeviceLost = "the device fails request after request; their answers say how";

class SteadyClock final : public Clock {
 public:
  double now() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

}  // namespace

class Engine::Body {
 public:
  Body(model::Runner& runner, const CacheBudget& budget, const EngineOptions& options)
      : room_(options.waiting), loop_(runner, budget, room_, clock_, options.steps), thread_([this] { work(); }) {}
  ~Body();
  std::variant<RequestId, Refusal> submit(Request request, std::shared_ptr<Sink> sink);
  std::optional<Refusal> check_room(int64_t num_prompt_tokens) const;
  void cancel(RequestId id);
  void wake();
  bool drain(double seconds);
  Status status() const;

 private:
  struct Submitted {
    RequestId id;
    Request request;
    std::shared_ptr<Sink> sink;
    double at;  // by the clock
  };

  std::optional<Refusal> closed() const;
  bool take_inbox();
  void work();
  void publish(std::string_view fault) noexcept;

  const SteadyClock clock_{};
  WaitingRoom room_;
  StepLoop loop_;  // the thread's, but for what is thread-safe there

  // The thread's: what it took from the lists below and has not seen to.
  std::vector<Submitted> inbox_;
  size_t num_taken_ = 0;  // of inbox_
  std::vector<RequestId> cancels_;

  mutable std::mutex lock_;
  std::condition_variable changed_;   // for the thread
  std::condition_variable finished_;  // for drain()
  std::vector<Submitted> submitted_;
  std::vector<RequestId> cancelled_;
  RequestId last_id_ = 0;
  bool is_woken_ = false, is_draining_ = false, cancels_all_ = false, is_ending_ = false;
  bool is_idle_ = true;  // no requests, as of the last step
  Status status_;
  std::thread thread_;  // last: it finds all else made
};

Engine::Body::~Body() {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::optional<Refusal> Engine::Body::closed() const {
  if (!is_draining_) return std::nullopt;
  return Refusal{.reason = Refusal::Reason::kDraining, .message = "shutting down: no more requests are taken"};
}

std::variant<RequestId, Refusal> Engine::Body::submit(Request request, std::shared_ptr<Sink> sink) {
  if (std::optional<Refusal> refused = loop_.find_refusal(request)) return std::move(*refused);
  RequestId id = 0;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (std::optional<Refusal> refused = closed()) return std::move(*refused);
    const int64_t num_tokens = static_cast<int64_t>(request.prompt.size());
    id = last_id_ + 1;
    submitted_.push_back({id, std::move(request), std::move(sink), clock_.now()});
    // Last: nothing fails after it, and what entered is sure to leave.
    if (std::optional<Refusal> refused = room_.enter(num_tokens)) {
      submitted_.pop_back();
      return std::move(*refused);
    }
    last_id_ = id;
  }
  changed_.notify_one();
  return id;
}

std::optional<Refusal> Engine::Body::check_room(int64_t num_prompt_tokens) const {
  const std::lock_guard<std::mutex> hold(lock_);
  if (std::optional<Refusal> refused = closed()) return refused;
  return room_.check(num_prompt_tokens);
}

void Engine::Body::cancel(RequestId id) {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    cancelled_.push_back(id);
  }
  changed_.notify_one();
}

void Engine::Body::wake() {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_woken_ = true;
  }
  changed_.notify_one();
}

bool Engine::Body::drain(double seconds) {
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

Engine::Status Engine::Body::status() const {
  const std::lock_guard<std::mutex> hold(lock_);
  Status status = status_;
  status.num_waiting_tokens = room_.num_tokens();
  status.is_draining = is_draining_;
  return status;
}

// What other threads asked for since the last step. False: nothing. What an exception leaves undone the next call does.
bool Engine::Body::take_inbox() {
  bool has_news = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (inbox_.empty() && cancels_.empty()) {
      inbox_.swap(submitted_);
      cancels_.swap(cancelled_);
    }
    has_news = std::exchange(is_woken_, false) || cancels_all_ || !inbox_.empty() || !cancels_.empty();
    is_idle_ = is_idle_ && inbox_.empty();
  }
  while (num_taken_ < inbox_.size()) {
    Submitted one = std::move(inbox_[num_taken_++]);
    loop_.accept(one.id, std::move(one.request), std::move(one.sink), one.at);
  }
  inbox_.clear(), num_taken_ = 0;
  while (!cancels_.empty()) {
    const RequestId id = cancels_.back();
    cancels_.pop_back();
    loop_.cancel(id, "");
  }
  bool cancels_all = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    cancels_all = cancels_all_ && submitted_.empty();
  }
  if (cancels_all) {
    loop_.cancel_all("shutting down");
    const std::lock_guard<std::mutex> hold(lock_);
    cancels_all_ = false;
  }
  return has_news;
}

void Engine::Body::publish(std::string_view fault) noexcept {
  const std::lock_guard<std::mutex> hold(lock_);
  status_.last_step = loop_.last_step();
  status_.totals = loop_.totals();
  try {
    if (!fault.empty()) {
      status_.fault = fault;
    } else if (loop_.num_device_failures() >= kMostDeviceFailures) {
      status_.fault = kDeviceLost;
    } else if (status_.fault == kDeviceLost) {
      status_.fault.clear();  // a step ran through
    }
  } catch (const std::exception&) {
    status_.fault = kOutOfMemory;
  }
  is_idle_ = loop_.is_idle();
  if (is_idle_) finished_.notify_all();
}

void Engine::Body::work() {
  int num_short = 0;  // turns in a row that ended for want of memory
  for (;;) {
    bool is_busy = true;
    try {
      const bool has_news = take_inbox();
      const bool has_stepped = loop_.step();
      if (has_stepped) num_short = 0;
      is_busy = has_stepped || has_news;
      publish("");
    } catch (const std::bad_alloc&) {
      // What runs is lost with its request's memory; what comes next may find some.
      loop_.abandon(kOutOfMemory, ErrorCode::kResourceExhausted);
      publish(++num_short < kMostShortTurns ? "" : kOutOfMemory);
    } catch (const std::exception& error) {
      loop_.abandon(error.what(), ErrorCode::kInternal);
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

Engine::Engine(model::Runner& runner, const CacheBudget& budget, const EngineOptions& options)
    : body_(std::make_unique<Body>(runner, budget, options)) {}

// No request, and so no sink, knows of the engine when its parts go.
Engine::~Engine() {
  body_->drain(0);
}

std::variant<RequestId, Refusal> Engine::submit(Request request, std::shared_ptr<Sink> sink) {
  return body_->submit(std::move(request), std::move(sink));
}
std::optional<Refusal> Engine::check_room(int64_t num_prompt_tokens) const {
  return body_->check_room(num_prompt_tokens);
}
void Engine::cancel(RequestId id) {
  body_->cancel(id);
}
void Engine::wake() {
  body_->wake();
}
bool Engine::drain(double seconds) {
  return body_->drain(seconds);
}
Engine::Status Engine::status() const {
  return body_->status();
}

}  // namespace tessera::engine
