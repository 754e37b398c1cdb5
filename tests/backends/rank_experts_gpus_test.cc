// SPDX-License-Identifier: Apache-2.0
// The experts of two, four or eight GPUs, as many as there are, that reach each other's memory give the bits of one,
// call after call, whoever is late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "backends/rank_group.h"
#include "base/error.h"
#include "comm/expert_exchange.h"
#include "comm/joined_ranks.h"
#include "device/device_choice.h"
#include "device/executor.h"

namespace tessera {
namespace {

using ops::RankExperts;
using testing::CallArrays, testing::CallSpec, testing::expected_of, testing::GroupShape, testing::hopper_variant,
    testing::random_ids, testing::Routing, testing::Weights;
using ::testing::Each;

class RankExpertsOfGpus : public testing::RandomTest, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    try {
      device::machine_of("cuda:" + std::to_string(GetParam() - 1));
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
    device::machine_of("cuda:0");  // makes it the thread's GPU again, on which expected values are computed
    if (hopper_variant<RankExperts>() == nullptr) GTEST_SKIP() << "no sm90 here";
  }
  // The same wherever it is made.
  CallArrays call(size_t number, const GroupShape& shape, const CallSpec& spec, device::MemorySpace& memory) const {
    Rng rng(seed_, number + 1);
    const int64_t total = std::accumulate(spec.num_tokens.begin(), spec.num_tokens.end(), int64_t{0});
    return {rng, shape, spec, random_ids(rng, shape, total, spec.routing), memory};
  }
};

TEST_P(RankExpertsOfGpus, GiveTheBitsOfOne) {
  const int world = GetParam();
  const GroupShape shape{.world = world, .hidden = 1024, .inner = 512, .num_experts = 32, .top_k = 4, .max_tokens = 64};
  // Rank 0 has `first` tokens, every other `others`.
  const auto tokens_of = [&](int64_t first, int64_t others) {
    std::vector<int64_t> tokens(static_cast<size_t>(world), others);
    tokens[0] = first;
    return tokens;
  };
  std::vector<CallSpec> specs = {{tokens_of(1, 1), Routing::kAny, true, false, 1},
                                 {tokens_of(0, 64)},
                                 {tokens_of(64, 64)},
                                 {tokens_of(64, 0), Routing::kOneRank},
                                 {tokens_of(0, 0)},
                                 {tokens_of(33, 7), Routing::kOneExpert}};
  for (int i = 0; i < 40; ++i) {
    std::vector<int64_t> tokens;
    for (int r = 0; r < world; ++r) {
      tokens.push_back(static_cast<int64_t>(rng_.below(static_cast<uint64_t>(shape.max_tokens) + 1)));
    }
    specs.push_back({tokens, static_cast<Routing>(rng_.below(4)), rng_.below(2) == 0});
  }
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  std::vector<std::vector<std::vector<float>>> results(static_cast<size_t>(world));
  const auto work = [&](comm::Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    const auto executor = device::make_executor(device::machine_of("cuda:" + std::to_string(rank)), 1);
    Rng rng(seed_, 0);
    const Weights weights(rng, shape, executor->memory());
    const device::Buffer workspace(static_cast<size_t>(variant.workspace_bytes(shape.of_rank(rank), shape.max_tokens)),
                                   executor->memory());
    std::string why_not;
    const auto exchange = comm::make_expert_exchange(
        bootstrap, {.max_tokens = shape.max_tokens, .top_k = shape.top_k, .hidden = shape.hidden}, why_not);
    EXPECT_EQ(why_not, "");
    if (exchange != nullptr) {
      std::vector<CallArrays> calls;
      for (size_t i = 0; i < specs.size(); ++i) calls.push_back(call(i, shape, specs[i], executor->memory()));
      executor->synchronize();
      for (size_t i = 0; i < specs.size(); ++i) {
        RankExperts::Args args = calls[i].args(rank, specs[i].num_tokens[static_cast<size_t>(rank)], specs[i], weights);
        args.peers = &exchange->peers(), args.workspace = workspace.data();
        variant.run(shape.of_rank(rank), args, executor->queue());
      }
      executor->synchronize();
      for (const CallArrays& one : calls) results[static_cast<size_t>(rank)].push_back(one.result());
    }
    bootstrap.all_gather({});
    bootstrap.leave();
  };
  EXPECT_THAT(testing::run_joined(world, work), Each(""));
  for (const auto& of_rank : results) ASSERT_EQ(of_rank.size(), specs.size());
  Rng rng(seed_, 0);
  const Weights weights(rng, shape, device::host_memory());
  for (size_t i = 0; i < specs.size(); ++i) {
    SCOPED_TRACE(i);
    const CallArrays one = call(i, shape, specs[i], device::host_memory());
    const std::vector<float> expected = expected_of(shape, one, specs[i].has_shared, weights);
    std::vector<float> found;
    for (size_t r = 0; r < results.size(); ++r) {
      const auto begin = results[r][i].begin() + static_cast<std::ptrdiff_t>(found.size());
      found.insert(found.end(), begin, begin + specs[i].num_tokens[r] * shape.hidden);
    }
    EXPECT_TRUE(testing::same_bits(found, expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, RankExpertsOfGpus, ::testing::Values(2, 4, 8));

}  // namespace
}  // namespace tessera
