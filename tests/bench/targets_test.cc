// SPDX-License-Identifier: Apache-2.0
// The run behind `tessera bench targets`, at its small size: every part is there, with the figures that it is judged
// by.
#include "bench/targets/targets.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"

namespace tessera {
namespace {

using bench::Target;
using bench::TargetRow;

bench::TargetReport run(const std::string& only) {
  bench::TargetOptions options;
  options.is_small = true, options.seconds = 0, options.only = only;
  size_t num_told = 0;
  bench::TargetReport report = bench::run_targets(options, [&](const TargetRow&) { ++num_told; });
  EXPECT_EQ(num_told, report.rows.size());
  return report;
}

TEST(Targets, EveryPartHasRows) {
  const bench::TargetReport report = run("");
  std::set<std::string> parts, names;
  for (const TargetRow& row : report.rows) {
    SCOPED_TRACE(row.part + ": " + row.name);
    parts.insert(row.part), names.insert(row.name);
    EXPECT_FALSE(row.time.seconds.empty());
    EXPECT_GE(row.tokens, 1);
    if (row.part == "linear, chain") {
      EXPECT_TRUE(row.read_time.seconds.empty());
      EXPECT_EQ(row.calls, bench::kChainCalls);
    } else {
      EXPECT_FALSE(row.read_time.seconds.empty());
    }
    EXPECT_TRUE(row.part.starts_with("layer") || !row.variant.empty());
    EXPECT_TRUE(row.part != "layer, prefill" || row.flops > 0);
    EXPECT_FALSE(row.has_target()) << "small shapes have none";
  }
  EXPECT_EQ(parts, (std::set<std::string>{"experts", "experts, 256 rows each", "experts' sublayer", "linear, alone",
                                          "linear, chain", "linear, many tokens", "attention", "indexer",
                                          "layer, decode", "layer, prefill"}));
  for (const char* name : {"small layer swa", "small layer csa", "small layer hca", "small mean of all layers"}) {
    EXPECT_TRUE(names.contains(name)) << name;
    EXPECT_TRUE(names.contains(std::string(name) + ", FP8 dense")) << name;
  }
  EXPECT_GT(report.ceilings.read_gbs.best, 0);
}

TEST(Targets, AreReachedFromTheRightSide) {
  TargetRow row;
  row.time.seconds = {2e-6}, row.read_time.seconds = {1e-6}, row.flops = 4'000'000;
  EXPECT_EQ(row.reached(), 0);
  EXPECT_EQ(to_string(row.target), "");
  row.target = {.us = 1};
  EXPECT_DOUBLE_EQ(row.reached(), 0.5);
  EXPECT_EQ(to_string(row.target), "<= 1.0 us");
  row.target = {.share_of_read = 0.25};
  EXPECT_DOUBLE_EQ(row.reached(), 2);
  EXPECT_EQ(to_string(row.target), ">= 25 % of read");
  row.target = {.tflops = 4};
  EXPECT_DOUBLE_EQ(row.reached(), 0.5);
  EXPECT_EQ(to_string(row.target), ">= 4 TFLOP/s");
}

TEST(Targets, RowsAreChosenByName) {
  for (const TargetRow& row : run("top_k").rows) EXPECT_EQ(row.part, "indexer");
  EXPECT_THROW(run("no such row"), Error);
}

}  // namespace
}  // namespace tessera
