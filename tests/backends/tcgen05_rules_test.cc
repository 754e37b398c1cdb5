// SPDX-License-Identifier: Apache-2.0
// tcgen05 in software on a GPU (cuda_common/ptx/emulated/tcgen05_on_device.cuh) ends a kernel that breaks a rule with
// a line that says which. Each runs in a process of its own, since its GPU's context is lost.
#include "backends/tcgen05_rules.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <span>

#include "testing/gpu_stage.h"

namespace tessera {
namespace {

using testing::BrokenRule;

struct Case {
  BrokenRule rule;
  const char* expected;
};

class SlowTcgen05RulesDeathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  static void run(BrokenRule rule, int num_blocks) {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) std::exit(77);
    std::exit(testing::obeys_rules(rule, num_blocks) ? 0 : 1);
  }
  static void check(int num_blocks, std::span<const Case> cases) {
    EXPECT_EXIT(run(BrokenRule::kNone, num_blocks), ::testing::ExitedWithCode(0), "");
    for (const Case& one : cases) EXPECT_EXIT(run(one.rule, num_blocks), ::testing::ExitedWithCode(1), one.expected);
  }
};

TEST_F(SlowTcgen05RulesDeathTest, BrokenOnesEndTheKernelWithALine) {
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
  check(1, cases);
}

TEST_F(SlowTcgen05RulesDeathTest, ThoseOfPairsDoToo) {
  const Case cases[] = {
      {BrokenRule::kOddCopies, "is for the pair's even block to give"},
      {BrokenRule::kOddMultiplies, "is for the pair's even block to give"},
      {BrokenRule::kOddCommits, "is for the pair's even block to give"},
      {BrokenRule::kRowsOfOneBlock, "M is not 128 rows of each thread block"},
      {BrokenRule::kColumnsInEights, "N is not 8 to 256 in steps of 8"},
      {BrokenRule::kBothGroups, "instructions of both cta_groups"},
      {BrokenRule::kNoScalesOfA, "scales of A were not written"},
      {BrokenRule::kScalesOfFewer, "scales of B were not written"},
      {BrokenRule::kOddScales, "scales of B in a pair's odd block are not those in its even one"},
      {BrokenRule::kOddHasLess, "sums take columns which are not all allocated"},
      {BrokenRule::kOverlap, "overlap in tensor memory"},
      {BrokenRule::kAddsToNothing, "adds where nothing was written"},
      {BrokenRule::kOddIsEarly, "product that is under way"},
      {BrokenRule::kOddLeavesSums, "whose sums nobody has read"},
      {BrokenRule::kOddIsLoading, "of which a load has not been waited for"},
      {BrokenRule::kTellsNobody, "is for no block, or for one that the cluster lacks"},
      {BrokenRule::kOddKeepsBack, "waits for ever for a barrier in shared memory"},
  };
  check(2, cases);
}

}  // namespace
}  // namespace tessera
