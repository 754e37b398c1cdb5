// SPDX-License-Identifier: Apache-2.0
#pragma once
// Many requests on one model: submit from any thread, tokens come to the request's sink. One thread of the engine's own
// runs the steps. Contract: docs/contracts/engine_loop.md.
#include <memory>
#include <string>
#include <variant>

#include "engine/cache_budget.h"
#include "engine/options.h"
#include "engine/request.h"
#include "engine/stats.h"

namespace tessera::engine {

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
    int64_t num_waiting_tokens = 0;  // of prompts not begun
    bool is_draining = false;
    // Not empty: an invariant broke, or memory ended again and again, and every request of that moment was ended so; or
    // the device fails one request after the other, which a step that runs through takes back.
    std::string fault;
  };
  Status status() const;

 private:
  class Body;
  const std::unique_ptr<Body> body_;
};

}  // namespace tessera::engine
