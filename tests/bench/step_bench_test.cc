// SPDX-License-Identifier: Apache-2.0
// Whole steps of a small model of random weights, on one rank and on two that are threads.
#include "bench/e2e/step_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "comm/loopback.h"
#include "comm/ranks.h"

namespace tessera::bench {
namespace {

using ::testing::Each;
using ::testing::Gt;

StepOptions small_options() {
  StepOptions options;
  options.shape = "small";
  options.contexts = {40, 100};
  options.batches = {1, 3};
  options.steps = 2, options.repeats = 2;
  options.load.max_step_tokens = 32;
  options.load.num_threads = 1;
  return options;
}

void expect_rows(const StepReport& report) {
  ASSERT_EQ(report.rows.size(), 6u);
  for (size_t i = 0; i < report.rows.size(); ++i) {
    const StepRow& row = report.rows[i];
    EXPECT_EQ(row.context, i < 3 ? 40 : 100);
    EXPECT_EQ(row.is_prompt, i % 3 == 0);
    EXPECT_EQ(row.tokens(), i % 3 == 0 ? row.context : i % 3 == 1 ? 1 : 3);
    EXPECT_EQ(row.time.seconds.size(), 2u);
    EXPECT_THAT(row.time.seconds, Each(Gt(0)));
    EXPECT_FALSE(row.outside_of_kernels());  // nothing is recorded on a processor
  }
}

TEST(StepBench, WhatIsOutsideOfKernelsIsTheRestOfAStep) {
  StepRow row;
  row.time.seconds = {2e-3, 1.9e-3, 2.3e-3};
  EXPECT_FALSE(row.outside_of_kernels());
  row.kernels.seconds = {1.8e-3, 1.9e-3, 1.7e-3};
  ASSERT_TRUE(row.outside_of_kernels());
  EXPECT_NEAR(*row.outside_of_kernels(), 0.1, 1e-12);
}

TEST(StepBench, OneRankHasRowsAndNoSums) {
  std::vector<int64_t> seen;
  const StepReport report =
      run_steps(small_options(),
                {.on_made = {}, .on_sum = {}, .on_row = [&](const StepRow& row) { seen.push_back(row.tokens()); }});
  expect_rows(report);
  EXPECT_EQ(seen, (std::vector<int64_t>{40, 1, 3, 100, 1, 3}));
  EXPECT_TRUE(report.sums.empty());
  EXPECT_EQ(report.num_layers, 5);
}

TEST(StepBench, RanksMakeTheSameSteps) {
  const uint64_t whole = run_steps(small_options(), {}).weight_bytes;
  for (const auto experts : {model::ExpertSplit::kById, model::ExpertSplit::kByWidth}) {
    auto ranks = comm::make_loopback(2, 120);
    std::vector<StepReport> reports(2);
    EXPECT_THAT(
        tessera::testing::run_ranks(ranks,
                                    [&](comm::Communicator& comm, device::Queue&) {
                                      StepOptions options = small_options();
                                      options.load.comm = &comm;
                                      options.load.shard = {comm.rank(), 2, model::AttentionSplit::kByGroup, experts};
                                      reports[static_cast<size_t>(comm.rank())] = run_steps(options, {});
                                    }),
        Each(""));
    for (const StepReport& report : reports) {
      expect_rows(report);
      EXPECT_EQ(report.sums.size(), 6u);
      EXPECT_LT(report.weight_bytes, whole);
    }
  }
}

TEST(StepBench, RefusesWhatTheModelCantHold) {
  StepOptions options = small_options();
  options.batches = {33};
  EXPECT_THROW(run_steps(options, {}), Error);
  options = small_options();
  options.contexts = {int64_t{1} << 20};
  EXPECT_THROW(run_steps(options, {}), Error);
}

}  // namespace
}  // namespace tessera::bench
