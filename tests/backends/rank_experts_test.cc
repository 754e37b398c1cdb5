// SPDX-License-Identifier: Apache-2.0
// The experts of a group of ranks give the bits of one rank that has them all, whoever has which tokens. All ranks are
// on one GPU, one after another: each does a part of a call before any does the next.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "backends/rank_group.h"
#include "backends/sm90/sum_plans.h"
#include "base/error.h"
#include "device/device_choice.h"
#include "device/executor.h"

namespace tessera {
namespace {

using ops::RankExperts, ops::RankExpertsPart;
using testing::CallArrays, testing::CallSpec, testing::expected_of, testing::GroupShape, testing::hopper_variant,
    testing::random_ids, testing::Routing, testing::Weights;
using ::testing::HasSubstr;

constexpr RankExpertsPart kParts[] = {RankExpertsPart::kDispatch, RankExpertsPart::kExperts, RankExpertsPart::kCombine};

// What ranks of one GPU share, as comm::ExpertExchange makes it.
class Memories {
 public:
  Memories(const GroupShape& shape, device::Executor& executor)
      : memory_(executor.memory()), ended_(sizeof(uint32_t), executor.staging()) {
    *ended_.as<uint32_t>() = 0;
    const device::ExpertPeersShape peers{.max_tokens = shape.max_tokens, .top_k = shape.top_k, .hidden = shape.hidden};
    const std::vector<uint8_t> no_words(static_cast<size_t>(peers.bytes(shape.world)), 0xFF);
    const std::vector<uint8_t> no_calls(device::kPeerCounters * sizeof(uint32_t));
    for (int r = 0; r < shape.world; ++r) {
      slots_.emplace_back(no_words.size(), memory_), calls_.emplace_back(no_calls.size(), memory_);
      memory_.upload(slots_.back().data(), no_words.data(), no_words.size());
      memory_.upload(calls_.back().data(), no_calls.data(), no_calls.size());
    }
    for (int r = 0; r < shape.world; ++r) {
      device::PeerView view;
      view.rank = r, view.world = shape.world, view.capacity = peers.sent_slots();
      for (int p = 0; p < shape.world; ++p) view.slots[p] = slots_[static_cast<size_t>(p)].as<uint64_t>();
      view.calls = calls_[static_cast<size_t>(r)].as<uint32_t>(), view.ended = ended_.as<uint32_t>();
      peers_.push_back({.view = view, .shape = peers});
    }
  }
  const device::ExpertPeers& of(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  void end() { *ended_.as<uint32_t>() = 1; }
  void expect_no_words() const {
    for (const device::Buffer& slots : slots_) {
      std::vector<uint8_t> bytes(slots.size());
      memory_.download(bytes.data(), slots.data(), bytes.size());
      EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0xFF), std::ssize(bytes)) << "slots are free again";
    }
  }

 private:
  device::MemorySpace& memory_;
  device::Buffer ended_;
  std::vector<device::Buffer> slots_, calls_;
  std::vector<device::ExpertPeers> peers_;
};

class RankExpertsTest : public testing::RandomTest {
 protected:
  void SetUp() override {
    if (hopper_variant<RankExperts>() == nullptr) GTEST_SKIP() << "no sm90 here";
    executor_ = device::make_executor(device::machine_of("cuda"), 1);
  }
  void check(const GroupShape& shape, const std::vector<CallSpec>& calls);
  // Of each rank, poisoned.
  std::vector<device::Buffer> make_workspaces(const GroupShape& shape) const {
    std::vector<device::Buffer> workspaces;
    for (int r = 0; r < shape.world; ++r) {
      const int64_t size = hopper_variant<RankExperts>()->workspace_bytes(shape.of_rank(r), shape.max_tokens);
      const std::vector<uint8_t> poison(static_cast<size_t>(size), 0xFF);
      workspaces.emplace_back(poison.size(), executor_->memory());
      executor_->memory().upload(workspaces.back().data(), poison.data(), poison.size());
    }
    return workspaces;
  }

  std::unique_ptr<device::Executor> executor_;
  std::set<bool> has_many_slots_;  // of the calls, which kernels are chosen by
};

void RankExpertsTest::check(const GroupShape& shape, const std::vector<CallSpec>& calls) {
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  device::MemorySpace& memory = executor_->memory();
  const Weights weights(rng_, shape, memory);
  const Memories memories(shape, *executor_);
  for (int r = 0; r < shape.world; ++r) {
    std::string why_not;
    ASSERT_TRUE(variant.supports(shape.of_rank(r), why_not)) << why_not;
  }
  const std::vector<device::Buffer> workspaces = make_workspaces(shape);
  for (const CallSpec& spec : calls) {
    SCOPED_TRACE(::testing::Message() << shape.of_rank(0).to_string() << ", tokens "
                                      << ::testing::PrintToString(spec.num_tokens));
    const int64_t total = std::accumulate(spec.num_tokens.begin(), spec.num_tokens.end(), int64_t{0});
    const CallArrays call(rng_, shape, spec, random_ids(rng_, shape, total, spec.routing), memory);
    const int64_t most = spec.most_tokens > 0 ? spec.most_tokens : shape.max_tokens;
    has_many_slots_.insert(backends::sm90::has_many_slots(shape.of_rank(0).routed, shape.world * most));
    std::vector<int> order(static_cast<size_t>(shape.world));
    std::iota(order.begin(), order.end(), 0);
    for (const RankExpertsPart part : kParts) {
      for (size_t i = 0; i + 1 < order.size(); ++i) std::swap(order[i], order[i + rng_.below(order.size() - i)]);
      for (const int r : order) {
        RankExperts::Args args = call.args(r, spec.num_tokens[static_cast<size_t>(r)], spec, weights);
        args.peers = &memories.of(r), args.part = part, args.workspace = workspaces[static_cast<size_t>(r)].data();
        variant.run(shape.of_rank(r), args, executor_->queue());
      }
    }
    executor_->synchronize();
    EXPECT_TRUE(testing::same_bits_or_nan(call.result(), expected_of(shape, call, spec.has_shared, weights)));
    memories.expect_no_words();
  }
}

TEST_F(RankExpertsTest, GivesTheBitsOfOneRank) {
  // Several calls in turn: both halves, and each again; ranks without tokens; all at once without any.
  check({.world = 2},
        {{{8, 3}}, {{3, 0}, Routing::kAny, true, false, 3}, {{0, 0}}, {{1, 7}, Routing::kOneRank, false}, {{2, 5}}});
  check({.world = 3, .hidden = 1024, .inner = 384, .num_experts = 9, .top_k = 4, .max_tokens = 3},
        {{{2, 3, 1}}, {{0, 0, 3}, Routing::kOneExpert}, {{1, 1, 1}, Routing::kOneRank, true, true, 1}});
  check({.world = 4, .inner = 256, .num_experts = 16, .top_k = 2, .max_tokens = 5},
        {{{5, 1, 0, 2}}, {{0, 4, 0, 0}, Routing::kOneRank}, {{3, 5, 1, 4}, Routing::kOneExpert, false}});
  check({.world = 8, .num_experts = 16, .top_k = 9, .max_tokens = 2},
        {{{2, 0, 1, 2, 1, 0, 0, 2}}, {{0, 1, 0, 0, 0, 0, 0, 0}}});
  EXPECT_EQ(has_many_slots_, (std::set<bool>{false, true}));
}

// More slots to an expert than a tile of few tokens has, and than one of many; an expert to a rank.
TEST_F(RankExpertsTest, HasManyTokensToAnExpert) {
  check({.world = 2, .num_experts = 2, .top_k = 2, .max_tokens = 70}, {{{70, 61}}});
  check({.world = 2, .num_experts = 32, .top_k = 2, .max_tokens = 20}, {{{3, 14}, Routing::kOneExpert}});
}

// More than one block groups, of few slots to an expert.
TEST_F(RankExpertsTest, GroupsManySlotsOfFewTokens) {
  const GroupShape shape{.world = 8, .num_experts = 184, .top_k = 4, .max_tokens = 33};
  EXPECT_GT(shape.world * shape.max_tokens * shape.top_k, backends::sm90::kMostFewSlots);
  check(shape, {{{1, 0, 0, 1, 0, 9, 0, 2}}});
  EXPECT_EQ(has_many_slots_, std::set<bool>{false});
}

TEST_F(RankExpertsTest, RoundsInputsAsOneRankDoes) {
  for (const ops::InputMode mode : {ops::InputMode::kA4, ops::InputMode::kA8}) {
    check({.world = 2, .max_tokens = 4, .input = mode}, {{{4, 3}}, {{0, 2}}});
  }
}

// Nobody computes such a slot and nobody waits for it, of few slots and of many; a token of none but such is zeros.
TEST_F(RankExpertsTest, IdsThatAreNoExpertsGiveZeros) {
  check({.world = 2}, {{{8, 3}, Routing::kPadded}, {{1, 7}, Routing::kPadded, false}, {{2, 5}}});
  check({.world = 3, .num_experts = 9, .max_tokens = 3}, {{{3, 0, 2}, Routing::kPadded}});
}

TEST_F(RankExpertsTest, NaNsOfTheWordThatMeansNoneAreNaNs) {
  check({.world = 2, .max_tokens = 3}, {{{3, 2}, Routing::kAny, true, true}, {{1, 3}, Routing::kAny, false, true}});
}

// A rank whose tokens nobody holds up is a call ahead: it sends the next one's while another has not taken in this
// one's.
TEST_F(RankExpertsTest, ARankMayBeACallAhead) {
  const GroupShape shape{.max_tokens = 3};
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  const Weights weights(rng_, shape, executor_->memory());
  const Memories memories(shape, *executor_);
  const std::vector<device::Buffer> workspaces = make_workspaces(shape);
  const CallSpec specs[] = {{{0, 3}}, {{2, 3}}, {{3, 1}}};
  std::vector<std::unique_ptr<CallArrays>> calls;
  for (const CallSpec& spec : specs) {
    const int64_t total = spec.num_tokens[0] + spec.num_tokens[1];
    calls.push_back(std::make_unique<CallArrays>(rng_, shape, spec, random_ids(rng_, shape, total, spec.routing),
                                                 executor_->memory()));
  }
  const auto run = [&](size_t call, int rank, RankExpertsPart part) {
    const CallSpec& spec = specs[call];
    RankExperts::Args args = calls[call]->args(rank, spec.num_tokens[static_cast<size_t>(rank)], spec, weights);
    args.peers = &memories.of(rank), args.part = part, args.workspace = workspaces[static_cast<size_t>(rank)].data();
    variant.run(shape.of_rank(rank), args, executor_->queue());
  };
  using Part = RankExpertsPart;
  run(0, 1, Part::kDispatch), run(0, 0, Part::kDispatch), run(0, 0, Part::kExperts), run(0, 0, Part::kCombine);
  run(1, 0, Part::kDispatch);
  run(0, 1, Part::kExperts), run(0, 1, Part::kCombine), run(1, 1, Part::kDispatch);
  for (const int rank : {1, 0}) run(1, rank, Part::kExperts);
  for (const int rank : {0, 1}) run(1, rank, Part::kCombine);
  for (const Part part : kParts) {
    for (const int rank : {0, 1}) run(2, rank, part);
  }
  executor_->synchronize();
  for (const auto& call : calls) {
    EXPECT_TRUE(testing::same_bits(call->result(), expected_of(shape, *call, true, weights)));
  }
  memories.expect_no_words();
}

// As a step is, once recorded and then replayed: what a call is of halves lies in the GPU's memory.
TEST_F(RankExpertsTest, CanBeRecorded) {
  if (!executor_->can_record()) GTEST_SKIP() << "nothing is recorded here";
  const GroupShape shape{.max_tokens = 3};
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  const Weights weights(rng_, shape, executor_->memory());
  const Memories memories(shape, *executor_);
  const CallSpec spec{{3, 1}};
  CallArrays call(rng_, shape, spec, random_ids(rng_, shape, 4, spec.routing), executor_->memory());
  const std::vector<device::Buffer> workspaces = make_workspaces(shape);
  const auto recording = executor_->record([&] {
    for (const RankExpertsPart part : kParts) {
      for (int r = 0; r < 2; ++r) {
        RankExperts::Args args = call.args(r, spec.num_tokens[static_cast<size_t>(r)], spec, weights);
        args.peers = &memories.of(r), args.part = part, args.workspace = workspaces[static_cast<size_t>(r)].data();
        variant.run(shape.of_rank(r), args, executor_->queue());
      }
    }
  });
  const std::vector<float> expected = expected_of(shape, call, true, weights);
  for (int i = 0; i < 3; ++i) {
    call.poison();
    recording->launch();
    executor_->synchronize();
    EXPECT_TRUE(testing::same_bits(call.result(), expected)) << i;
  }
  memories.expect_no_words();
}

// Where kernels of two ranks run at once, whole calls wait for each other. A kernel's code is loaded when it first
// comes, which waits for all that runs on its GPU, here a rank that waits for the other: so each of the calls
// comes by parts first.
TEST_F(RankExpertsTest, RanksRunAtOnceOnTwoQueues) {
  if (testing::kGpuIsEmulated) GTEST_SKIP() << "an emulated GPU runs one kernel at a time";
  const GroupShape shape{.hidden = 1024, .inner = 512, .num_experts = 8, .max_tokens = 6};
  ASSERT_NO_FATAL_FAILURE(check(shape, {{{6, 1}}, {{0, 5}}, {{2, 0}}, {{6, 6}}}));
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  const auto other = device::make_executor(device::machine_of("cuda"), 1);
  const Weights weights(rng_, shape, executor_->memory());
  const Memories memories(shape, *executor_);
  const std::vector<device::Buffer> workspaces = make_workspaces(shape);
  for (const std::vector<int64_t>& num_tokens : std::vector<std::vector<int64_t>>{{6, 1}, {0, 5}, {2, 0}, {6, 6}}) {
    const CallSpec spec{num_tokens};
    const int64_t total = num_tokens[0] + num_tokens[1];
    const CallArrays call(rng_, shape, spec, random_ids(rng_, shape, total, spec.routing), executor_->memory());
    executor_->synchronize();
    for (int r = 0; r < 2; ++r) {
      RankExperts::Args args = call.args(r, num_tokens[static_cast<size_t>(r)], spec, weights);
      args.peers = &memories.of(r), args.workspace = workspaces[static_cast<size_t>(r)].data();
      variant.run(shape.of_rank(r), args, r == 0 ? executor_->queue() : other->queue());
    }
    other->synchronize(), executor_->synchronize();
    EXPECT_TRUE(testing::same_bits(call.result(), expected_of(shape, call, true, weights)));
    memories.expect_no_words();
  }
}

// Nobody waits once the group has ended: what a rank gives then is undefined.
TEST_F(RankExpertsTest, NobodyWaitsForARankThatIsGone) {
  const GroupShape shape{.max_tokens = 2};
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  const Weights weights(rng_, shape, executor_->memory());
  Memories memories(shape, *executor_);
  const CallSpec spec{{2, 2}};
  const CallArrays call(rng_, shape, spec, random_ids(rng_, shape, 4, spec.routing), executor_->memory());
  const std::vector<device::Buffer> workspaces = make_workspaces(shape);
  RankExperts::Args args = call.args(0, 2, spec, weights);
  args.peers = &memories.of(0), args.workspace = workspaces[0].data();
  memories.end();
  variant.run(shape.of_rank(0), args, executor_->queue());
  executor_->synchronize();
}

TEST(RankExpertsCall, SaysWhatDoesNotFit) {
  const GroupShape shape{};
  const RankExperts::Desc desc = shape.of_rank(1);
  device::ExpertPeers peers;
  peers.view.rank = 1, peers.view.world = 2;
  peers.shape = {.max_tokens = 8, .top_k = shape.top_k, .hidden = shape.hidden};
  RankExperts::Args args;
  args.num_tokens = 8, args.peers = &peers;
  EXPECT_EQ(ops::checked_most_tokens(desc, args), 8);
  const auto refusal = [&](const RankExperts::Args& of) -> std::string {
    try {
      ops::checked_most_tokens(desc, of);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  args.num_tokens = 9;
  EXPECT_EQ(refusal(args), "rank_experts: 9 tokens of a rank, at most 8: memory of ranks has room for 8");
  args.num_tokens = -1;
  EXPECT_EQ(refusal(args), "rank_experts: -1 tokens of a rank");
  args.num_tokens = 3, args.most_tokens = 2;
  EXPECT_THAT(refusal(args), HasSubstr("3 tokens of a rank, at most 2"));
  args.num_tokens = 1, args.most_tokens = 9;
  EXPECT_THAT(refusal(args), HasSubstr("at most 9: memory of ranks has room for 8"));
  args.most_tokens = 0, peers.view.rank = 0;
  EXPECT_THAT(refusal(args), HasSubstr("rank 0 of 2 has not the experts from 4 on"));
  peers.view.rank = 1, peers.shape.top_k = 2;
  EXPECT_THAT(refusal(args), HasSubstr("512 and 2 experts of each, not for 512 and 3"));
  args.peers = nullptr;
  EXPECT_THAT(refusal(args), HasSubstr("no memory of ranks"));
}

TEST(RankExpertsCall, SaysWhichSharesThereAreNot) {
  const auto refusal = [](const auto& change) {
    RankExperts::Desc desc = GroupShape{}.of_rank(1);
    change(desc);
    std::string why_not;
    EXPECT_FALSE(ops::rank_experts_shares_agree(desc, why_not));
    return why_not;
  };
  using Desc = RankExperts::Desc;
  std::string why_not;
  EXPECT_TRUE(ops::rank_experts_shares_agree(GroupShape{}.of_rank(1), why_not));
  EXPECT_THAT(refusal([](Desc& desc) { desc.world = 3; }), HasSubstr("4 of 8 experts are no equal share of 3 ranks"));
  EXPECT_THAT(refusal([](Desc& desc) { desc.world = 9; }), HasSubstr("9 ranks, 1 to 8 can"));
  EXPECT_THAT(refusal([](Desc& desc) { desc.routed.first_expert = 2; }), HasSubstr("no rank's 4 experts begin with 2"));
  EXPECT_THAT(refusal([](Desc& desc) { desc.routed.top_k = 9; }), HasSubstr("can't choose 9 of 8 experts"));
}

TEST_F(RankExpertsTest, DeclinesWhatItsKernelsHaveNot) {
  const auto refusal = [](const auto& change) {
    RankExperts::Desc desc = GroupShape{}.of_rank(0);
    change(desc);
    std::string why_not;
    EXPECT_FALSE(hopper_variant<RankExperts>()->supports(desc, why_not));
    return why_not;
  };
  using Desc = RankExperts::Desc;
  EXPECT_EQ(refusal([](Desc& desc) { desc.routed.format = ops::WeightFormat::kFp8Block; }), "weights are not NVFP4");
  EXPECT_THAT(refusal([](Desc& desc) { desc.routed.hidden = 640; }), HasSubstr("multiple of 512"));
  EXPECT_THAT(refusal([](Desc& desc) { desc.routed.num_local = 8, desc.world = 1; }), HasSubstr("a rank by itself"));
}

}  // namespace
}  // namespace tessera
