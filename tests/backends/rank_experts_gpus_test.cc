// SPDX-License-Identifier: Apache-2.0
// The experts of two GPUs that reach each other's memory give the bits of one, call after call, whoever is late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

class RankExpertsOfTwoGpus : public testing::RandomTest {
 protected:
  void SetUp() override {
    try {
      device::machine_of("cuda:1");
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
    if (hopper_variant<RankExperts>() == nullptr) GTEST_SKIP() << "no sm90 here";
  }
  // The same wherever it is made.
  CallArrays call(size_t number, const GroupShape& shape, const CallSpec& spec, device::MemorySpace& memory) const {
    Rng rng(seed_, number + 1);
    const int64_t total = spec.num_tokens[0] + spec.num_tokens[1];
    return {rng, shape, spec, random_ids(rng, shape, total, spec.routing), memory};
  }
};

TEST_F(RankExpertsOfTwoGpus, GiveTheBitsOfOne) {
  const GroupShape shape{.hidden = 1024, .inner = 512, .num_experts = 32, .top_k = 4, .max_tokens = 64};
  std::vector<CallSpec> specs = {
      {{1, 1}, Routing::kAny, true, false, 1}, {{0, 64}}, {{64, 64}}, {{64, 0}, Routing::kOneRank}, {{0, 0}},
      {{33, 7}, Routing::kOneExpert}};
  for (int i = 0; i < 40; ++i) {
    const auto tokens = [&] { return static_cast<int64_t>(rng_.below(static_cast<uint64_t>(shape.max_tokens) + 1)); };
    specs.push_back({{tokens(), tokens()}, static_cast<Routing>(rng_.below(3)), rng_.below(2) == 0});
  }
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  std::vector<std::vector<float>> results[2];
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
      for (const CallArrays& one : calls) results[rank].push_back(one.result());
    }
    bootstrap.all_gather({});
    bootstrap.leave();
  };
  EXPECT_THAT(testing::run_joined(2, work), Each(""));
  ASSERT_EQ(results[0].size(), specs.size());
  ASSERT_EQ(results[1].size(), specs.size());
  Rng rng(seed_, 0);
  const Weights weights(rng, shape, device::host_memory());
  for (size_t i = 0; i < specs.size(); ++i) {
    SCOPED_TRACE(i);
    const CallArrays one = call(i, shape, specs[i], device::host_memory());
    const std::vector<float> expected = expected_of(shape, one, specs[i].has_shared, weights);
    const int64_t first = specs[i].num_tokens[0] * shape.hidden;
    std::vector<float> found(results[0][i].begin(), results[0][i].begin() + first);
    found.insert(found.end(), results[1][i].begin() + first, results[1][i].end());
    EXPECT_TRUE(testing::same_bits(found, expected));
  }
}

}  // namespace
}  // namespace tessera
