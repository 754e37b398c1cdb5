// SPDX-License-Identifier: Apache-2.0
// Timing of recorded calls: how many are timed at once, which, and that a sample is their mean.
#include "bench/ops/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "testing/apart_executor.h"

namespace tessera {
namespace {

using testing::ApartExecutor;

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

TEST(Rounds, TimeManyCallsAtOnceInTurn) {
  for (const auto records : {ApartExecutor::Records::kNo, ApartExecutor::Records::kYes}) {
    ApartExecutor executor(1, records);
    std::set<int64_t> seen_a, seen_b;
    const auto a = [&](int64_t run) { seen_a.insert(run), sleep_for(2e-5); };
    const auto b = [&](int64_t run) { seen_b.insert(run), sleep_for(1e-5); };
    int64_t calls = 0;
    const bench::Pair pair = bench::measure_rounds(executor, a, b, 12, 0, calls);
    // Fewer only where the machine holds the test up.
    EXPECT_GE(calls, 1);
    EXPECT_LE(calls, 12);
    // Each call of a round has its own copy of what it reads, and what is read beside it another. (Two were tried
    // before.)
    EXPECT_EQ(std::ssize(seen_a), std::max<int64_t>(calls, 2));
    EXPECT_EQ(std::ssize(seen_b), calls);
    for (const int64_t run : seen_a) EXPECT_EQ(run % 2, 0);
    for (const int64_t run : seen_b) EXPECT_EQ(run % 2, 1);
    ASSERT_GE(pair.a.seconds.size(), 5u);
    EXPECT_EQ(pair.a.seconds.size(), pair.b.seconds.size());
    // A sleep is never shorter than asked for.
    EXPECT_GE(pair.a.quantile(0), 2e-5);
    EXPECT_GE(pair.b.quantile(0), 1e-5);
  }
}

TEST(Rounds, LongCallsAreFew) {
  ApartExecutor executor(1, ApartExecutor::Records::kYes);
  int64_t calls = 0;
  const bench::Pair pair = bench::measure_rounds(
      executor, [](int64_t) { sleep_for(0.03); }, [](int64_t) {}, 256, 0, calls);
  EXPECT_GE(calls, 1);
  EXPECT_LE(calls, 2);
  EXPECT_GE(pair.a.quantile(0), 0.03);
  EXPECT_GE(bench::measure_round(
                executor, [](int64_t) { sleep_for(0.001); }, 3),
            0.001);
}

}  // namespace
}  // namespace tessera
