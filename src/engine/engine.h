// SPDX-License-Identifier: Apache-2.0
#pragma once
// Many requests on one model: submit from any thread, tokens come to the request's sink. One thread of the engine's own
// runs the steps. Contract: docs/contracts/engine_loop.md.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "engine/step_loop.h"

namespace tessera::engine {

struct EngineOptions {
  WaitingRoom::Limits waiting{};
  StepLoopOptions steps{};
};

// What a sink calls when it has room again.
class Wakeable {
 public:
  virtual ~Wakeable() = default;
  virtual void wake() = 0;
};

// Thread-safe, but for the destructor.
class Engine final : public Wakeable {
 public:
  // Runner, budget, prefixes and observer must outlive the engine; nobody else uses the runner while it lives.
  Engine(model::Runner& runner, const CacheBudget& budget, const EngineOptions& options);
  // Cancels what is left and waits for the step under way. Not from a sink.
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The request's id, its handle; or why it is not taken, and then the sink is never called. Does not wait.
  std::variant<RequestId, Refusal> submit(Request request, std::shared_ptr<Sink> sink);
  // Whether a request with so many prompt tokens would be refused now, whatever else is in it: asked before tokenising.
  std::optional<Refusal> check_room(int64_t num_prompt_tokens) const;
  // Ends a request before the next step. Unknown and ended ones are ignored.
  void cancel(RequestId id);
  // A sink has room again.
  void wake() override;

  // Takes no more requests, lets those taken end, cancels the rest after `seconds`; returns when none is left. True:
  // none had to be cancelled. Not from a sink.
  bool drain(double seconds);

  struct Status {
    StepStats last_step;
    Totals totals;
    bool is_draining = false;
    std::string fault;  // not empty: an invariant broke, and every request of that moment was ended with this line
  };
  Status status() const;

 private:
  struct Submitted {
    RequestId id;
    Request request;
    std::shared_ptr<Sink> sink;
  };
  class SteadyClock final : public Clock {
   public:
    double now() const override;
  };

  std::optional<Refusal> closed() const;
  bool take_inbox();
  void work();
  void publish(const std::string& fault);

  const SteadyClock clock_;
  WaitingRoom room_;
  StepLoop loop_;  // the thread's, but for what is thread-safe there

  mutable std::mutex lock_;
  std::condition_variable changed_;   // for the thread
  std::condition_variable finished_;  // for drain()
  std::vector<Submitted> submitted_;
  std::vector<RequestId> cancelled_;
  RequestId last_id_ = 0;
  bool is_woken_ = false, is_draining_ = false, cancels_all_ = false, is_ending_ = false;
  bool is_idle_ = true;  // no requests, as of the last step
  Status status_;
  std::thread thread_;
};

}  // namespace tessera::engine
