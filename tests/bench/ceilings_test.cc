// SPDX-License-Identifier: Apache-2.0
// What is said of ceilings and shares, from made-up measurements.
#include "bench/ops/ceilings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/ops/bench_ops.h"

namespace tessera::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Ceiling, IsTheBestOfSeveralMeasurements) {
  // Eight of 2 seconds, the best of 1 and one that was disturbed.
  const Ceiling some = ceiling_of(12, {{2, 2, 2, 2, 1, 2, 2, 2, 2, 30}});
  EXPECT_EQ(some.best, 12);
  EXPECT_EQ(some.p10, 6);
  EXPECT_FALSE(some.is_stable());
  EXPECT_TRUE(ceiling_of(12, {{1.0, 1.1, 1.2, 1.2, 1.1, 9, 1.1, 1.0, 1.1, 1.2}}).is_stable()) << "one of ten";
  EXPECT_EQ(ceiling_of(12, {}).best, 0);
}

TEST(Ceiling, NamesWhatIsUnstable) {
  Ceilings all;
  EXPECT_EQ(all.unstable(), "") << "what this machine lacks";
  all.read_gbs = {40, 38};
  EXPECT_EQ(all.unstable(), "");
  all.read_one_gbs = {30, 20};
  all.amx_gflops = {900, 100};
  EXPECT_EQ(all.unstable(), "read by one thread, AMX");
}

TEST(Report, MarksSharesAboveTheCeiling) {
  Report report;
  report.ceilings.bf16_gflops = {100, 90};
  Row row;
  row.variant = "avx512.bf16";
  row.flops = 114'000'000'000;
  row.time = {{1}}, row.read_time = {{0.5}};
  EXPECT_DOUBLE_EQ(row.share(report.ceilings), 1.14);
  report.rows.push_back(row);
  EXPECT_FALSE(row.is_implausible(report.ceilings));
  EXPECT_THAT(report_notes(report), IsEmpty());
  report.rows.back().read_time = {{1.2}};
  EXPECT_TRUE(report.rows.back().is_implausible(report.ceilings));
  EXPECT_THAT(report_notes(report), ElementsAre(HasSubstr("115 %")));
  EXPECT_THAT(report_svg(report, "a machine"), HasSubstr("120 % !"));
  report.ceilings.bf16_gflops.p10 = 50;
  EXPECT_THAT(report_notes(report), ElementsAre(HasSubstr("BF16 products"), HasSubstr("115 %")));
}

}  // namespace
}  // namespace tessera::bench
