// SPDX-License-Identifier: Apache-2.0
#pragma once
// Requests step by step, on one thread: takes the scheduler's plan, runs it, draws, delivers. Engine puts a thread
// around it; the simulator of the tests drives it by hand. Rules: docs/contracts/engine_loop.md.
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/options.h"
#include "engine/prefix_store.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/stats.h"
#include "engine/waiting_room.h"

namespace tessera::engine {

class StepLoop {
 public:
  // All must outlive the loop.
  StepLoop(model::Runner& runner, const CacheBudget& budget, WaitingRoom& room, const Clock& clock,
           const StepLoopOptions& options);
  ~StepLoop();

  // Why this request can't run here, ever; nothing where it can. Thread-safe.
  std::optional<Refusal> find_refusal(const Request& request) const;

  // The request, without refusal and in the waiting room, now waits its turn. `id` rises; `submitted` is by the clock.
  // Where there is no memory for it, it ends.
  void accept(RequestId id, Request request, std::shared_ptr<Sink> sink, double submitted);
  // Ends a request as cancelled, with a line that says why (empty: somebody asked). Unknown ids are ignored. Neither
  // this nor accept() may be called by a sink.
  void cancel(RequestId id, const std::string& why);
  void cancel_all(const std::string& why);
  // Ends every request as failed, whatever the scheduler thinks: for when an exception came out of the loop, which can
  // go on after it.
  void abandon(std::string_view why, ErrorCode code = ErrorCode::kInternal) noexcept;

  // Makes one step. False: there was nothing to run (nothing waits, or consumers have no room). Throws kInternal where
  // an invariant is broken; what requests, sinks and the runner do wrong ends requests.
  bool step();

  bool is_idle() const { return requests_.empty() && !is_ahead_; }  // no requests, and nothing is queued
  // When a paused request's time is up; infinity: none is paused.
  double next_deadline() const;
  bool is_ahead() const { return is_ahead_; }  // the next step is queued
  const StepStats& last_step() const { return stats_; }
  const Totals& totals() const { return totals_; }
  // Requests in a row that an error of the device ended, with no step between them that ran through.
  int num_device_failures() const { return num_device_failures_; }
  const Scheduler& scheduler() const { return scheduler_; }
  int64_t swap_bytes() const { return swap_bytes_; }
  // Of states whose choice ended while a step that runs them was queued. They go with that step; until then nothing
  // more is charged.
  int64_t leaving_bytes() const;
  // Throws kInternal where ledgers disagree with the requests. Cost: all requests.
  void audit() const;

 private:
  struct Choice;
  struct Live;
  struct Running;  // a slice of the step under way
  struct Leaving;

  static void tell_failure(Sink& sink, ErrorCode code, const char* error) noexcept;
  void join(RequestId id, Request request, std::shared_ptr<Sink> sink, double submitted);
  Choice* find(SequenceKey key, Live*& live) const;
  void read_rooms(double now);
  void set_paused(Live& live, bool is_paused);
  void preempt(SequenceKey key);
  void begin(SequenceKey key, double now);
  void make_state(SequenceKey key);
  void make_state(Live& live, Choice& choice);
  bool restore(Choice& choice);
  bool give_up_prefix();
  bool give_way();
  template <class Make>
  std::unique_ptr<model::SequenceState> make_with_room(const Make& make);
  void drop_saved(Choice& choice);
  void prepare(const Scheduler::Slice& slice);
  void prepare(Live& live, Choice& choice, const Scheduler::Slice& slice);
  void drop_slices(RequestId id);
  void drop_slice(SequenceKey key);
  bool prepare_planned(double now);
  void run(bool is_queued);
  bool knows_next() const noexcept;
  bool prepare_ahead() noexcept;
  void queue_ahead();
  const Running* find_ahead(SequenceKey key) const;
  void take_up_ahead();
  void forget_ahead() noexcept;
  void drop_ahead() noexcept;
  void part_with_leaving(bool has_run) noexcept;
  void take_apart(const std::string& error, ErrorCode code);
  void deliver(const TensorView& logits);
  void deliver_prompt_logprobs(Live& live, const Running& slice, std::span<const float> rows);
  void offer(Live& live, const Choice& choice, const Running& slice);
  void fork(Live& live);
  void draw(Live& live, Choice& choice, const Running& slice, std::span<const float> row);
  void release(const Live& live, Choice& choice, bool is_offered);
  void end_choice(Live& live, Choice& choice, FinishReason reason);
  void end(Live& live, FinishReason reason, ErrorCode code, const std::string& error);
  void finish(Live& live);
  void set_gauges();
  void count(double start);

  model::Runner& runner_;
  const CacheBudget& budget_;
  WaitingRoom& room_;
  const Clock& clock_;
  const StepLoopOptions options_;
  Scheduler scheduler_;
  std::map<RequestId, std::unique_ptr<Live>> requests_;
  std::vector<Running> running_;
  std::vector<model::SequenceSlice> slices_;
  std::deque<model::Draw> draws_;               // of the slices, which hold their addresses
  int64_t num_masks_ = 0;                       // of the step's draws
  const uint32_t* last_shared_mask_ = nullptr;  // that counts among them
  // Of the step that is queued behind the one under way, or behind the last (step_loop_ahead.cc).
  bool is_ahead_ = false;
  std::vector<Running> ahead_;
  std::deque<model::Draw> ahead_draws_;
  std::vector<model::Draw*> next_draws_;  // their addresses
  std::vector<Leaving> leaving_;          // that it runs though they ended
  int64_t swap_bytes_ = 0;
  StepStats stats_;
  Totals totals_;
  int num_device_failures_ = 0;
};

}  // namespace tessera::engine
