// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the engine says about itself: of each step, and since it began.
#include <cstdint>

namespace tessera::engine {

// After one step.
struct StepStats {
  int64_t num_prefill_tokens = 0;  // prompts, and what is run again after a preemption or a fault
  int64_t num_decode_tokens = 0;
  int64_t num_slices = 0;                          // sequences in the step
  int64_t num_drawn = 0;                           // tokens
  int64_t num_admitted = 0;                        // sequences that got a place in this step
  int64_t num_preempted = 0;                       // that lost theirs
  int64_t num_waiting = 0;                         // requests not begun
  int64_t num_set_aside = 0;                       // sequences preempted and not yet back
  int64_t num_running = 0;                         // sequences
  int64_t num_paused = 0;                          // requests whose consumer has no room
  int64_t cache_bytes = 0, cache_total_bytes = 0;  // charged, and what there is
  int64_t swap_bytes = 0;
  int64_t num_snapshots = 0;                             // of the prefix store
  int64_t snapshot_bytes = 0, snapshot_total_bytes = 0;  // that they take, and may take
  double model_seconds = 0;                              // in Runner::step
  double seconds = 0;                                    // of the whole step
  bool has_failed = false;                               // the runner threw
};

// Since the engine began; never falling.
struct Totals {
  int64_t num_steps = 0, num_failed_steps = 0;
  int64_t num_prefill_tokens = 0, num_decode_tokens = 0, num_drawn = 0;
  int64_t num_requests = 0;  // accepted; each ends as one of:
  int64_t num_completed = 0, num_cancelled = 0, num_failed = 0;
  int64_t num_prompt_tokens = 0, num_cached_tokens = 0;  // of requests that were begun
  // Of requests whose prompts were looked up in the prefix store: they, those of which a beginning was known, and their
  // prompt tokens. num_cached_tokens were found.
  int64_t num_lookups = 0, num_hits = 0, num_lookup_tokens = 0;
  int64_t num_snapshots_kept = 0, num_snapshots_evicted = 0;
  int64_t num_swapped = 0, num_recomputed = 0;  // preemptions
  double model_seconds = 0, step_seconds = 0;
};

// Called by the engine's thread after each step; must return at once.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void step(const StepStats& stats, const Totals& totals) = 0;
};

// Seconds since any fixed moment.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() const = 0;
};

}  // namespace tessera::engine
