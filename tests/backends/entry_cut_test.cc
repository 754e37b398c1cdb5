// SPDX-License-Identifier: Apache-2.0
// Entries of work hold every slot once, are as few as there can be, and take as few steps of products as there can be.
#include "backends/cuda_common/entry_cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/integer_math.h"

namespace tessera::backends::cuda_common {
namespace {

void check(int32_t count, int32_t most, int32_t step) {
  SCOPED_TRACE(std::to_string(count) + " in tiles of " + std::to_string(most));
  const EntryCut cut(count, most, step);
  ASSERT_EQ(cut.parts, ceil_div(count, most));
  int32_t steps = 0, least = most, largest = 0;
  for (int32_t part = 0; part < cut.parts; ++part) {
    EXPECT_EQ(cut.begin(part) % step, 0);
    EXPECT_EQ(cut.begin(part) + cut.size(part), part + 1 < cut.parts ? cut.begin(part + 1) : count);
    const int32_t taken = ceil_div(cut.size(part), step);
    steps += taken, least = std::min(least, taken), largest = std::max(largest, taken);
    EXPECT_GT(cut.size(part), 0);
    EXPECT_LE(cut.size(part), most);
  }
  EXPECT_EQ(cut.begin(0), 0);
  EXPECT_EQ(steps, ceil_div(count, step));
  EXPECT_LE(largest - least, 1);
}

TEST(EntryCut, EveryNumberOfSlots) {
  for (int32_t count = 1; count < 1100; ++count) check(count, 128, 32), check(count, 128, 8), check(count, 8, 8);
  for (const int32_t count : {1 << 20, (1 << 20) + 1}) check(count, 128, 32);
}

TEST(EntryCut, ANumberThatTwoLikeTilesWouldPad) {
  const EntryCut cut(208, 128, 32);
  EXPECT_EQ(cut.parts, 2);
  EXPECT_EQ(cut.size(0), 96);
  EXPECT_EQ(cut.size(1), 112);
}

}  // namespace
}  // namespace tessera::backends::cuda_common
