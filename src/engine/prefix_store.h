// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the step loop asks for states that have seen a beginning of what it is about to run.
#include <cstdint>
#include <memory>
#include <span>

#include "engine/request.h"

namespace tessera::engine {

struct PrefixStats {
  int64_t num_snapshots = 0;           // kept now
  int64_t bytes = 0, total_bytes = 0;  // that they take, and may take
  // Since the beginning; never falling.
  int64_t num_kept = 0;     // snapshots
  int64_t num_evicted = 0;  // of those, given up for others, for memory, or after a fault
};

// Called by the engine's thread alone.
class PrefixStore {
 public:
  virtual ~PrefixStore() = default;
  // A state of the engine's runner, the caller's from now on, that has seen a beginning of `ids`, not all of it, and
  // holds `capacity` tokens. Null: nothing is known.
  virtual std::unique_ptr<model::SequenceState> find(const Request& request, std::span<const int32_t> ids,
                                                     int64_t capacity) = 0;
  // The first position after `position` that it wants to be offered, though the prompt goes on: the chunk ends there.
  // Anything beyond the prompt: none.
  virtual int64_t next_offer(const Request& request, int64_t position) = 0;
  // `state` has seen `ids`, and may be copied or saved now. Called there, when a prompt has been run, and when a choice
  // ends.
  virtual void offer(const Request& request, std::span<const int32_t> ids, const model::SequenceState& state) = 0;
  // A step failed that ran `ids`: nothing that has seen a beginning of them is to be trusted.
  virtual void forget(const Request& request, std::span<const int32_t> ids) = 0;
  // Memory is short: gives some up. False: it has nothing more to give.
  virtual bool give_up() = 0;
  virtual PrefixStats stats() const = 0;
};

}  // namespace tessera::engine
