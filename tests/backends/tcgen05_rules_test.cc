// SPDX-License-Identifier: Apache-2.0
// tcgen05 in software on a GPU (cuda_common/ptx/emulated/tcgen05_on_device.cuh) ends a kernel that breaks a rule with
// a line that says which. Each runs in a process of its own, since its GPU's context is lost.
#include "backends/tcgen05_rules.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "testing/gpu_stage.h"

namespace tessera {
namespace {

using testing::BrokenRule;

struct Case {
  BrokenRule rule;
  const char* expected;
};

TEST(SlowTcgen05RulesDeathTest, BrokenOnesEndTheKernelWithALine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Case cases[] = {
      {BrokenRule::kReservedBits, "reserved bits set"},
      {BrokenRule::kStride, "stride is not 8 swizzled rows"},
      {BrokenRule::kColumns, "sums take columns which are not all allocated"},
      {BrokenRule::kScaleColumns, "scales of A take columns which are not all allocated"},
      {BrokenRule::kOverlap, "overlap in tensor memory"},
      {BrokenRule::kNoScalesOfA, "scales of A were not written"},
      {BrokenRule::kNoScalesOfB, "scales of B were not written"},
      {BrokenRule::kAddsToNothing, "adds where nothing was written"},
      {BrokenRule::kOtherLanes, "reaches the 32 lanes of its own alone"},
      {BrokenRule::kNoWaitForProducts, "product that is under way"},
      {BrokenRule::kBeginsAnew, "whose sums nobody has read"},
      {BrokenRule::kNoWaitForLoad, "of which a load has not been waited for"},
      {BrokenRule::kScalesOverSums, "overwrites a column which holds sums"},
      {BrokenRule::kTwoIssuers, "two threads of a block issue"},
      {BrokenRule::kNoPair, "without a cluster of pairs"},
      {BrokenRule::kDealloc, "gives back columns that no allocation gave"},
      {BrokenRule::kMissingBytes, "waits for ever for a barrier in shared memory"},
  };
  const auto run = [](BrokenRule rule) {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) std::exit(77);
    std::exit(testing::obeys_rules(rule) ? 0 : 1);
  };
  std::string why_not;
  if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  EXPECT_EXIT(run(BrokenRule::kNone), ::testing::ExitedWithCode(0), "");
  for (const Case& one : cases) EXPECT_EXIT(run(one.rule), ::testing::ExitedWithCode(1), one.expected);
}

}  // namespace
}  // namespace tessera
