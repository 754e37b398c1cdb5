// SPDX-License-Identifier: Apache-2.0
#pragma once
// A world in which the step loop lives for some thousand requests: a fake runner, clients that come in bursts, cancel,
// take their tokens slowly or never, steps and calls that fail, too little memory, and ask
// again with what they were told. All of it follows from (seed,
// number).
#include <cstdint>
#include <string>

namespace tessera::engine {

struct WorldReport {
  int64_t num_requests = 0;  // accepted
  int64_t num_refused = 0, num_completed = 0, num_cancelled = 0, num_failed = 0, num_too_slow = 0;
  int64_t num_steps = 0, num_tokens = 0, num_swapped = 0, num_recomputed = 0, num_failed_steps = 0, num_pauses = 0;
  int64_t num_short_steps = 0;                                   // that found no memory for what they were to run
  int64_t num_ahead = 0;                                         // that were queued behind another
  int64_t num_hits = 0, num_cached_tokens = 0, num_evicted = 0;  // of the prefix cache
  int64_t num_from_host = 0;                                     // that came back from its host tier
  double most_of_wait_bound = 0;  // the largest share of the bound on admissions that somebody waited
  uint64_t digest = 0;            // of all that happened
  void add(const WorldReport& other);
  std::string to_string() const;
};

// Runs one world to its end and checks the contract's invariants after each step. Throws tessera::Error at the first
// one that does not hold.
WorldReport run_world(uint64_t seed, uint64_t number, int64_t num_requests);

}  // namespace tessera::engine
