// SPDX-License-Identifier: Apache-2.0
// What differs between ranks is named, by all of them alike.
#include "comm/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/joined_ranks.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_joined;
using ::testing::Each;

TEST(Agreement, EqualFactsPass) {
  EXPECT_THAT(run_joined(3,
                         [](Bootstrap& bootstrap) {
                           agree(bootstrap, std::vector<Fact>{{"precision", "a16 x fp8"}, {"split", "heads"}});
                           agree(bootstrap, std::vector<Fact>{});
                         }),
              Each(""));
}

TEST(Agreement, TheFirstDifferenceIsNamedOnEveryRank) {
  EXPECT_THAT(
      run_joined(3,
                 [](Bootstrap& bootstrap) {
                   const std::string split = bootstrap.rank() == 1 ? "width\n" : "heads";
                   const std::string kernel = bootstrap.rank() == 0 ? "avx2" : "ref";
                   agree(bootstrap, std::vector<Fact>{{"precision", "a16"}, {"split", split}, {"kernel", kernel}});
                 }),
      Each("rank 1 of 3 differs from rank 0 in split: expected \"heads\", found \"width\\x0a\""));
}

TEST(Agreement, AFactThatOneLacksIsNamed) {
  EXPECT_THAT(run_joined(2,
                         [](Bootstrap& bootstrap) {
                           std::vector<Fact> facts = {{"kernels of linear", "avx2"}};
                           if (bootstrap.rank() == 1) facts.push_back({"kernels of moe", "ref"});
                           agree(bootstrap, facts);
                         }),
              Each("rank 1 of 2 differs from rank 0 in kernels of moe: expected \"nothing\", found \"kernels of moe "
                   "ref\""));
}

TEST(Agreement, WhatTwoHaveAlikeIsNamedOnEveryRank) {
  const auto run = [](int world, int other) {
    return run_joined(world, [&](Bootstrap& bootstrap) {
      const int gpu = bootstrap.rank() == 2 ? other : bootstrap.rank();
      differ(bootstrap, {"GPU", "GPU-" + std::to_string(gpu)}, "set LOCAL_RANK");
    });
  };
  EXPECT_THAT(run(3, 2), Each(""));
  EXPECT_THAT(run(4, 1), Each("ranks 1 and 2 of 4 have the same GPU \"GPU-1\": set LOCAL_RANK"));
}

}  // namespace
}  // namespace tessera::comm
