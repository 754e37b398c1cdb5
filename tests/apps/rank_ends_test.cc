// SPDX-License-Identifier: Apache-2.0
#include "rank_ends.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

namespace tessera::app {
namespace {

using Lines = std::vector<std::string>;

// Both ends of a pipe that does not block.
class RankEndsPipe : public ::testing::Test {
 protected:
  RankEndsPipe() { EXPECT_EQ(pipe2(ends_.data(), O_CLOEXEC | O_NONBLOCK), 0); }
  ~RankEndsPipe() override {
    for (const int end : ends_) close(end);
  }
  int out() const { return ends_[0]; }
  int in() const { return ends_[1]; }

 private:
  std::array<int, 2> ends_{};
};

TEST_F(RankEndsPipe, HandsOverWhatRanksSay) {
  EXPECT_TRUE(handed_over(out()).empty());
  EXPECT_TRUE(hand_over(in(), {3, {kExitBadModel, "tensor x: expected 4, found 5"}}));
  EXPECT_TRUE(hand_over(in(), {1, {kExitDevice, ""}}));
  const std::vector<RankEnd> ends = handed_over(out());
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].rank, 3);
  EXPECT_EQ(ends[0].fault.code, kExitBadModel);
  EXPECT_EQ(ends[0].fault.message, "tensor x: expected 4, found 5");
  EXPECT_EQ(ends[1].rank, 1);
  EXPECT_EQ(ends[1].fault.message, "");
}

TEST_F(RankEndsPipe, HandsOverTheBeginningOfLongWords) {
  const std::string words(5000, 'w');
  EXPECT_TRUE(hand_over(in(), {1, {kExitMemory, words}}));
  EXPECT_TRUE(hand_over(in(), {2, {kExitMemory, "short"}}));
  const std::vector<RankEnd> ends = handed_over(out());
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_GT(ends[0].fault.message.size(), 1000u);
  EXPECT_TRUE(words.starts_with(ends[0].fault.message));
  EXPECT_EQ(ends[1].fault.message, "short");
}

TEST_F(RankEndsPipe, SaysWhereNothingTakesIt) {
  const std::string words(3000, 'w');
  bool has_room = true;
  for (int i = 0; i < 1000 && has_room; ++i) has_room = hand_over(in(), {1, {kExitMemory, words}});
  EXPECT_FALSE(has_room);
  for (const RankEnd& end : handed_over(out())) EXPECT_EQ(end.fault.message, words);
}

TEST_F(RankEndsPipe, EndsAtARecordThatIsCut) {
  const std::array<uint8_t, 6> bytes = {1, 0, 0, 0, 3, 0};
  ASSERT_EQ(write(in(), bytes.data(), bytes.size()), 6);
  EXPECT_TRUE(handed_over(out()).empty());
}

TEST(RankEnds, SaysAFaultOnceAndEndsWithItsCode) {
  const GroupEnd end = end_together({{0, {kExitDevice, "rank 1 of 2 failed: no such file"}},  // heard of it
                                     {1, {kExitBadModel, "no such file"}}},
                                    2);
  EXPECT_EQ(end.code, kExitBadModel);
  EXPECT_EQ(end.lines, Lines{"rank 1 of 2: no such file"});
}

TEST(RankEnds, KnowsWordsOfWhichOthersHeardTheBeginning) {
  const std::string words(700, 'w');
  const GroupEnd end = end_together(
      {{0, {kExitDevice, "rank 1 of 3 failed: " + words.substr(0, 200) + "..."}}, {1, {kExitMemory, words}}}, 3);
  EXPECT_EQ(end.code, kExitMemory);
  EXPECT_EQ(end.lines, Lines{"rank 1 of 3: " + words});
}

TEST(RankEnds, NamesNobodyForWhatSeveralFound) {
  const std::vector<RankEnd> ends = {{2, {kExitBadModel, "truncated"}},
                                     {1, {kExitBadModel, "truncated"}},
                                     {0, {kExitDevice, "rank 1 of 3 failed: truncated"}}};
  const GroupEnd end = end_together(ends, 3);
  EXPECT_EQ(end.code, kExitBadModel);
  EXPECT_EQ(end.lines, Lines{"truncated"});
}

TEST(RankEnds, SaysFaultsThatDifferByRank) {
  const GroupEnd end = end_together({{2, {kExitMemory, "b"}}, {0, {kExitDevice, "lost rank 2 of 3: ended"}}}, 3);
  EXPECT_EQ(end.code, kExitMemory);
  EXPECT_EQ(end.lines, (Lines{"lost rank 2 of 3: ended", "rank 2 of 3: b"}));
}

TEST(RankEnds, TakesTheCodeOfWhoSaidNothing) {
  const GroupEnd end = end_together({{0, {kExitDevice, "rank 1 ended"}}, {1, {kExitUsage, ""}}}, 2);
  EXPECT_EQ(end.code, kExitUsage);
  EXPECT_EQ(end.lines, Lines{"rank 1 ended"});
}

TEST(RankEnds, IsNeverSilent) {
  const GroupEnd end =
      end_together({{0, {kExitDevice, "rank 1 of 2 failed: a"}}, {1, {kExitDevice, "rank 0 of 2 failed: b"}}}, 2);
  EXPECT_EQ(end.code, kExitDevice);
  EXPECT_EQ(end.lines, Lines{"rank 1 of 2 failed: a"});
}

}  // namespace
}  // namespace tessera::app
