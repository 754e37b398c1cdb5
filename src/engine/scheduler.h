// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who runs next, and how many tokens: continuous batching as a pure decision. It knows sequences by key and numbers
// only, has no thread and no clock, and given the same calls decides the same. Rules: docs/contracts/engine_loop.md.
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/cache_budget.h"
#include "engine/priority.h"

namespace tessera::engine {

// Rises in order of arrival: of two sequences the one with the lower key came first.
using SequenceKey = uint64_t;

class Scheduler {
 public:
  // Every so many admissions one goes to whoever waits and came first.
  static constexpr int64_t kOldestEvery = 4;
  // Prompts that share the half of what decoding leaves of a step which is not shared by all.
  static constexpr size_t kPrefillLanes = 4;
  // Preempted so often, a sequence comes before those that were not, whatever their priority.
  static constexpr int kMaxPreemptions = 2;
  // An admission leaves what runs room for so many tokens more, each.
  static constexpr int64_t kHeadroomTokens = 16;
  // While somebody waits, so many steps follow a planned one before the next is planned: whose turn it is changes with
  // what the others are served.
  static constexpr int64_t kMostAhead = 8;

  struct Limits {
    int64_t max_step_tokens = 0;  // of the runner
    int64_t max_running = 0;      // sequences with a state; see most_running()
    // Of a step in which a sequence decodes, whose next token waits for the prompts beside it; 0: as max_step_tokens.
    int64_t max_mixed_step_tokens = 0;
  };
  // `max_running`, cut so that decoding leaves an eighth of a mixed step to prompts; at least 1.
  static int64_t most_running(const Limits& limits);

  struct Job {
    SequenceKey key = 0;
    uint64_t client = 0;
    Priority priority = Priority::kNormal;
    int64_t num_tokens = 0;  // known: all that the state must have seen before the next is drawn; at least 1
    int64_t capacity = 0;    // most that it will ever have
    int64_t num_copies = 1;  // sequences that fork() makes of it, itself included; at most most_running()
  };

  struct Slice {
    SequenceKey key = 0;
    int64_t num_tokens = 0;
  };
  // In this order: the preempted give their states up, the admitted get one, the slices are run.
  struct Plan {
    std::vector<SequenceKey> preempted, admitted;
    std::vector<Slice> slices;
  };

  enum class Phase { kWaiting, kRunning };
  struct Entry {
    Job job;
    Phase phase = Phase::kWaiting;
    int64_t num_done = 0;      // tokens that its state has seen; of a preempted one: that its saved state has
    int64_t num_reserved = 0;  // tokens that its charge covers
    int64_t charge = 0;        // bytes; 0 while waiting
    int64_t alone_until = 0;   // until that position it runs in steps of its own
    int num_preempted = 0;
    bool has_begun = false;  // was admitted once
    bool is_paused = false;
  };

  // The budget must outlive the scheduler.
  Scheduler(const Limits& limits, const CacheBudget& budget);

  // Whether a job could run if it were the only one.
  bool fits(int64_t capacity, int64_t num_copies) const;
  // The job waits. It must fit.
  void add(const Job& job);
  // `child` runs from now on, beside `parent` and at the same point; the parent was added with a copy for it.
  void fork(SequenceKey parent, SequenceKey child);
  // Ended, for whatever reason.
  void remove(SequenceKey key);
  // Forgets every sequence.
  void clear();
  // A paused sequence takes no part in steps and in admission.
  void set_paused(SequenceKey key, bool is_paused);

  // Decides the next step. Valid until the next call.
  const Plan& plan();

  // Whether the step after the planned one, whose slices have not run yet, is known: all that run and are not paused
  // decode, nobody has come, gone or been paused since plan() found no room for who waits, and each has room for the
  // token to be run and one more to be drawn. Then their charges cover it from now on. The number of these sequences;
  // 0, and nothing has changed: it is not known.
  int64_t grow_ahead();

  // What came of it. The state of a running sequence has seen `num_tokens` more;
  void ran(SequenceKey key, int64_t num_tokens);
  // a token was drawn and is to be run;
  void drew(SequenceKey key);
  // the state (or the saved one) has seen so many tokens, fewer than are known: where a sequence began with a prefix,
  // or lost its state;
  void set_done(SequenceKey key, int64_t num_done);
  // a step failed, and the state is lost: until `position` the sequence runs alone.
  void isolate(SequenceKey key, int64_t position);
  // A step found less memory than was granted: the last of the keeping order is preempted, this one, and no more is
  // granted than was charged without it, until one that runs has ended. None: only one runs.
  std::optional<SequenceKey> give_way();

  int64_t used_bytes() const { return used_bytes_; }
  int64_t num_running() const { return num_running_; }  // copies to come included
  int64_t num_waiting() const { return static_cast<int64_t>(entries_.size() - running_.size()); }
  int64_t max_running() const { return limits_.max_running; }
  int64_t num_admissions() const { return num_admissions_; }
  // All sequences in order of arrival.
  const std::map<SequenceKey, Entry>& entries() const { return entries_; }
  // Throws kInternal where sums and lists disagree with the entries, or the budget is exceeded. Cost: all entries.
  void audit() const;

 private:
  // The sequences of one client at one priority.
  struct Flow {
    int64_t served_tokens = 0;
    int64_t num_live = 0;
    std::set<SequenceKey> waiting;  // that could be admitted: not the paused ones
  };
  using FlowKey = std::pair<Priority, uint64_t>;

  Entry& at(SequenceKey key);
  Flow& flow_of(const Entry& entry) { return flows_.at({entry.job.priority, entry.job.client}); }
  int64_t cost(const Entry& entry, int64_t num_tokens) const;
  void charge(Entry& entry, int64_t num_tokens);
  int64_t headroom(const Entry& entry) const;
  void enqueue(Entry& entry);
  void dequeue(Entry& entry);
  void start(Entry& entry);
  void put_back(Entry& entry);
  void preempt(Entry& entry);
  void grow();
  void admit();
  Entry& next_to_admit();
  bool make_room(const Entry& head, int64_t missing_bytes);
  bool plan_alone();
  int64_t share_out(std::span<Slice* const> slices, int64_t num_tokens);
  void plan_slices();

  const Limits limits_;  // as they hold: none is 0
  const CacheBudget& budget_;
  std::map<SequenceKey, Entry> entries_;
  std::map<FlowKey, Flow> flows_;
  std::set<SequenceKey> eligible_;  // all flows' waiting
  bool has_news_ = false;           // since plan(): somebody who waits may have a place
  int64_t num_ahead_ = 0;           // steps since plan()
  std::vector<Entry*> running_;     // plan() brings them into keeping order
  int64_t used_bytes_ = 0, num_running_ = 0, num_admissions_ = 0;
  int64_t granted_bytes_;  // at most so many are charged while several run
  Plan plan_;
};

}  // namespace tessera::engine
