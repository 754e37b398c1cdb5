// SPDX-License-Identifier: Apache-2.0
#pragma once
// How an engine is set up.
#include <cstdint>

#include "engine/waiting_room.h"

namespace tessera::engine {

class PrefixStore;
class StepObserver;

struct StepLoopOptions {
  int64_t max_running = 256;          // sequences; cut to Scheduler::most_running
  int64_t max_mixed_step_tokens = 0;  // as Scheduler::Limits
  int64_t swap_bytes = 0;             // host memory for states of preempted sequences; 0: they are run again
  double slow_consumer_seconds = 60;  // without room for so long, a request ends
  PrefixStore* prefixes = nullptr;    // null: every request begins at its first token
  StepObserver* observer = nullptr;   // null: nobody
};

struct EngineOptions {
  WaitingRoom::Limits waiting{};
  StepLoopOptions steps{};
};

}  // namespace tessera::engine
