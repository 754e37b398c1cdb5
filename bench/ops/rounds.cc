// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/rounds.h"

#include <algorithm>
#include <cmath>

namespace tessera::bench {

namespace {

// A round is launched so often, one after the other, that starting and waiting do not count; and it is made of no more
// calls than take kMostSeconds.
constexpr double kLeastSeconds = 0.002, kMostSeconds = 0.05;
constexpr int64_t kRounds = 5, kMostLaunches = 1000;

// Calls work(first), work(first + 2), ..., as measure_pair counts.
class Round {
 public:
  Round(device::Executor& executor, const std::function<void(int64_t)>& work, int64_t first, int64_t calls)
      : executor_(executor), calls_(calls), queue_all_([&work, first, calls] {
          for (int64_t i = 0; i < calls; ++i) work(first + 2 * i);
        }) {
    if (executor.can_record()) recording_ = executor.record(queue_all_);
    const double seconds = run();
    launches_ = std::clamp<int64_t>(std::llround(std::ceil(kLeastSeconds / std::max(seconds, 1e-9))), 1, kMostLaunches);
    run();
  }

  // Seconds of all launches.
  double run() {
    const double begin = seconds_now();
    for (int64_t i = 0; i < launches_; ++i) recording_ != nullptr ? recording_->launch() : queue_all_();
    executor_.synchronize();
    return seconds_now() - begin;
  }
  double per_call() const { return 1.0 / static_cast<double>(launches_ * calls_); }

 private:
  device::Executor& executor_;
  int64_t calls_, launches_ = 1;
  std::function<void()> queue_all_;
  std::unique_ptr<device::Recording> recording_;
};

// Of one call, alone and after one that is not counted.
double seconds_alone(device::Executor& executor, const std::function<void(int64_t)>& work) {
  work(0);
  executor.synchronize();
  const double begin = seconds_now();
  work(2);
  executor.synchronize();
  return seconds_now() - begin;
}

}  // namespace

Pair measure_rounds(device::Executor& executor, const std::function<void(int64_t)>& a,
                    const std::function<void(int64_t)>& b, int64_t most_calls, double min_seconds, int64_t& calls) {
  const double alone = std::max(seconds_alone(executor, a), 1e-9);
  calls = std::clamp<int64_t>(std::llround(kMostSeconds / alone), 1, most_calls);
  Round round_a(executor, a, 0, calls), round_b(executor, b, 1, calls);
  Pair pair = measure_pair([&](int64_t) { round_a.run(); }, [&](int64_t) { round_b.run(); }, kRounds, min_seconds);
  for (double& seconds : pair.a.seconds) seconds *= round_a.per_call();
  for (double& seconds : pair.b.seconds) seconds *= round_b.per_call();
  return pair;
}

Pair measure_calls(device::Executor& executor, const std::function<void(int64_t)>& a,
                   const std::function<void(int64_t)>& b, int64_t most_calls, double min_seconds, int64_t& calls) {
  if (executor.can_record()) return measure_rounds(executor, a, b, most_calls, min_seconds, calls);
  calls = 1;
  return measure_pair(a, b, 20, min_seconds);
}

Pair measure_alone(device::Executor& executor, const std::function<void(int64_t)>& a,
                   const std::function<void(int64_t)>& b, const std::function<void()>& fence, int64_t most_calls,
                   double min_seconds, int64_t& calls) {
  const auto fenced = [&fence](const std::function<void(int64_t)>& work) {
    return [&fence, &work](int64_t run) { fence(), work(run); };
  };
  Pair pair = measure_rounds(executor, fenced(a), fenced(b), most_calls, min_seconds, calls);
  const double alone = measure_round(
      executor, [&](int64_t) { fence(); }, calls);
  for (Samples* samples : {&pair.a, &pair.b}) {
    for (double& seconds : samples->seconds) seconds -= alone;
  }
  return pair;
}

Samples measure_chain(device::Executor& executor, const std::function<void(int64_t)>& work, int64_t calls,
                      double min_seconds) {
  Round chain(executor, work, 0, calls), twice(executor, work, 0, 2 * calls);
  const Pair pair = measure_pair([&](int64_t) { chain.run(); }, [&](int64_t) { twice.run(); }, kRounds, min_seconds);
  Samples added;
  for (size_t i = 0; i < pair.a.seconds.size(); ++i) {
    added.seconds.push_back(2 * pair.b.seconds[i] * twice.per_call() - pair.a.seconds[i] * chain.per_call());
  }
  return added;
}

double measure_round(device::Executor& executor, const std::function<void(int64_t)>& work, int64_t calls) {
  Round round(executor, work, 0, calls);
  Samples samples;
  for (int64_t i = 0; i < kRounds; ++i) samples.seconds.push_back(round.run() * round.per_call());
  return samples.quantile(0.5);
}

}  // namespace tessera::bench
