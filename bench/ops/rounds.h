// SPDX-License-Identifier: Apache-2.0
#pragma once
// Timing on a device whose calls return before their work is done: many calls, recorded as one graph as a step is, are
// timed as a whole. One call is too short to be timed, and alone it would also pay what a launch costs.
#include <cstdint>
#include <functional>

#include "bench/ops/timing.h"
#include "device/executor.h"

namespace tessera::bench {

// `a` and `b` as in measure_pair, but queueing their work; a sample is the mean of the calls of one round, at most
// `most_calls` (fewer where that takes long), which `calls` says. Where the executor can't record, rounds are called.
Pair measure_rounds(device::Executor& executor, const std::function<void(int64_t)>& a,
                    const std::function<void(int64_t)>& b, int64_t most_calls, double min_seconds, int64_t& calls);

// measure_rounds where the executor records, measure_pair where calls end before they return: there `calls` is 1.
Pair measure_calls(device::Executor& executor, const std::function<void(int64_t)>& a,
                   const std::function<void(int64_t)>& b, int64_t most_calls, double min_seconds, int64_t& calls);

// `a` and `b` as in measure_rounds, each call behind `fence`, which lets nothing overlap with the call before it; the
// median of what as many fences take by themselves is subtracted.
Pair measure_alone(device::Executor& executor, const std::function<void(int64_t)>& a,
                   const std::function<void(int64_t)>& b, const std::function<void()>& fence, int64_t most_calls,
                   double min_seconds, int64_t& calls);

// What a call adds to a chain of `calls` calls: samples are differences of rounds of twice as many and of so many.
Samples measure_chain(device::Executor& executor, const std::function<void(int64_t)>& work, int64_t calls,
                      double min_seconds);

// Seconds of one call of `work`, the median of several such rounds.
double measure_round(device::Executor& executor, const std::function<void(int64_t)>& work, int64_t calls);

}  // namespace tessera::bench
