// SPDX-License-Identifier: Apache-2.0
// Where there is memory for an exchange, all ranks have it; where there is none all say the same reason.
#include "comm/expert_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "comm/joined_ranks.h"
#include "device/device_choice.h"
#include "device/executor.h"

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr device::ExpertPeersShape kShape{.max_tokens = 5, .top_k = 3, .hidden = 512};

TEST(ExpertExchange, HasTheSizeThatItSays) {
  // Of two halves of three senders: a count in 128 bytes, choices in 128 more, five rows; and fifteen slots back.
  EXPECT_EQ(kShape.row_slot(0), 32);
  EXPECT_EQ(kShape.sent_slots(), 32 + 5 * 128);
  EXPECT_EQ(kShape.bytes(3), 8 * (2 * 3 * (32 + 5 * 128) + 15 * 128));
}

TEST(ExpertExchange, EveryRankSaysWhyThereIsNone) {
  std::vector<std::string> reasons(3);
  EXPECT_THAT(testing::run_joined(3,
                                  [&](Bootstrap& bootstrap) {
                                    const auto rank = static_cast<size_t>(bootstrap.rank());
                                    device::ExpertPeersShape shape = kShape;
                                    if (rank == 2) shape.top_k = 4;
                                    EXPECT_EQ(make_expert_exchange(bootstrap, shape, reasons[rank]), nullptr);
                                    bootstrap.leave();
                                  }),
              Each(""));
  EXPECT_THAT(reasons, Each("rank 0 exchanges 5 tokens of 3 experts each, rows of 512, rank 2 5 tokens of 4 experts "
                            "each, rows of 512"));
}

TEST(ExpertExchange, RanksOfOneGpuOrOfNoneAreToldAlike) {
  std::vector<std::string> reasons(2);
  std::vector<char> has_one(2);  // a byte each: ranks write theirs at once
  EXPECT_THAT(testing::run_joined(2,
                                  [&](Bootstrap& bootstrap) {
                                    const auto rank = static_cast<size_t>(bootstrap.rank());
                                    const auto exchange = make_expert_exchange(bootstrap, kShape, reasons[rank]);
                                    has_one[rank] = exchange != nullptr ? 1 : 0;
                                    bootstrap.all_gather({});
                                    bootstrap.leave();
                                  }),
              Each(""));
  EXPECT_EQ(has_one[0], has_one[1]);
  EXPECT_EQ(reasons[0], reasons[1]);
  EXPECT_NE(has_one[0] != 0, !reasons[0].empty());
}

TEST(ExpertExchange, RefusesShapesOfNothing) {
  EXPECT_THAT(testing::run_joined(1,
                                  [](Bootstrap& bootstrap) {
                                    std::string why_not;
                                    make_expert_exchange(bootstrap, {.max_tokens = 0, .top_k = 3, .hidden = 512},
                                                         why_not);
                                  }),
              Each(HasSubstr("can't exchange 0 tokens of 3 experts each, rows of 512")));
  EXPECT_THAT(testing::run_joined(1,
                                  [](Bootstrap& bootstrap) {
                                    std::string why_not;
                                    make_expert_exchange(bootstrap, {.max_tokens = 1, .top_k = 3, .hidden = 510},
                                                         why_not);
                                  }),
              Each(HasSubstr("rows of 510")));
}

}  // namespace
}  // namespace tessera::comm
