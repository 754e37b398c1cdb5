// SPDX-License-Identifier: Apache-2.0
// The experts of a group of ranks give the bits of one rank that has them all, whoever has which tokens. All ranks are
// on one GPU, one after another: each does a part of a call before any does the next.
#include "ops/rank_experts/rank_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "backends/sm90/sum_plans.h"
#include "base/error.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "numeric/bf16.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::RankExperts, ops::RankExpertsPart;
using ::testing::HasSubstr;

constexpr RankExpertsPart kParts[] = {RankExpertsPart::kDispatch, RankExpertsPart::kExperts, RankExpertsPart::kCombine};

// sm90's variant; null: this machine has none.
template <class Op>
const ops::Variant<Op>* hopper_variant() {
  if (!testing::has_backend("sm90")) return nullptr;
  for (const ops::Backend* backend : backends::all_backends()) {
    if (std::string(backend->name) == "sm90") return &backend->variants_of<Op>().front();
  }
  return nullptr;
}

struct GroupShape {
  int world = 2;
  int64_t hidden = 512, inner = 128, num_experts = 8, top_k = 3, max_tokens = 8;
  ops::InputMode input = ops::InputMode::kA16;

  ops::MoeExperts::Desc experts(int64_t first, int64_t num_local) const {
    return {.hidden = hidden,
            .inner = inner,
            .first_expert = first,
            .num_local = num_local,
            .num_experts = num_experts,
            .top_k = top_k,
            .input = input,
            .swiglu_limit = 10};
  }
  RankExperts::Desc of_rank(int rank) const {
    const int64_t num_local = num_experts / world;
    return {.routed = experts(rank * num_local, num_local), .world = world};
  }
};

// The experts' weights, packed, on the host and on the GPU. Of many experts some have the same.
class Weights {
 public:
  Weights(Rng& rng, const GroupShape& shape, device::MemorySpace& memory) {
    constexpr int64_t kDifferent = 16;
    const ops::MoeExperts::Desc desc = shape.experts(0, shape.num_experts);
    for (int64_t e = 0; e < shape.num_experts; ++e) {
      for (size_t i = 0; i < 3; ++i) {
        if (e >= kDifferent) {
          views_[i].push_back(views_[i][static_cast<size_t>(e - kDifferent)]);
          there_[i].push_back(there_[i][static_cast<size_t>(e - kDifferent)]);
          continue;
        }
        const bool is_down = i == 2;
        const testing::RandomWeight weight = testing::random_weight(
            rng, desc.format, is_down ? desc.hidden : desc.inner, is_down ? desc.inner : desc.hidden);
        packed_.push_back(testing::weight_for(*hopper_variant<ops::MoeExperts>(), desc, weight.view));
        const testing::VariantWeight& packed = packed_.back();
        placed_.push_back(packed.data.clone_into(memory)), placed_.push_back(packed.scales.clone_into(memory));
        ops::WeightView there = packed.view;
        there.data = placed_[placed_.size() - 2].data(), there.block_scales = placed_.back().data();
        views_[i].push_back(packed.view), there_[i].push_back(there);
      }
    }
    for (size_t i = 0; i < 3; ++i) {
      arrays_[i] = device::Buffer(there_[i].size() * sizeof(ops::WeightView), memory);
      memory.upload(arrays_[i].data(), there_[i].data(), arrays_[i].size());
    }
  }
  const std::vector<ops::WeightView>* on_host() const { return views_; }
  const ops::WeightView* of(int matrix, int64_t first_expert) const {
    return arrays_[matrix].as<ops::WeightView>() + first_expert;
  }

 private:
  std::vector<testing::VariantWeight> packed_;
  std::vector<device::Buffer> placed_;
  std::vector<ops::WeightView> views_[3], there_[3];  // w1, w3, w2
  device::Buffer arrays_[3];
};

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

enum class Routing { kAny, kOneRank, kOneExpert };  // tokens' first choices: of one rank's experts, the same one

struct CallSpec {
  std::vector<int64_t> num_tokens;  // of each rank
  Routing routing = Routing::kAny;
  bool has_shared = true, has_nans = false;
  int64_t most_tokens = 0;
};

class RankExpertsTest : public testing::RandomTest {
 protected:
  void SetUp() override {
    if (hopper_variant<RankExperts>() == nullptr) GTEST_SKIP() << "no sm90 here";
    executor_ = device::make_executor(device::machine_of("cuda"), 1);
  }
  std::vector<int32_t> random_ids(const GroupShape& shape, int64_t num_tokens, Routing routing);
  void check(const GroupShape& shape, const std::vector<CallSpec>& calls);

  std::unique_ptr<device::Executor> executor_;
  std::set<bool> has_many_slots_;  // of the calls, which kernels are chosen by
};

std::vector<int32_t> RankExpertsTest::random_ids(const GroupShape& shape, int64_t num_tokens, Routing routing) {
  const int64_t num_local = shape.num_experts / shape.world;
  const auto favoured = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(shape.num_experts)));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::vector<int32_t> all(static_cast<size_t>(shape.num_experts));
    std::iota(all.begin(), all.end(), 0);
    for (size_t i = 0; i + 1 < all.size(); ++i) std::swap(all[i], all[i + rng_.below(all.size() - i)]);
    if (routing == Routing::kOneExpert) std::swap(all[0], *std::find(all.begin(), all.end(), favoured));
    if (routing == Routing::kOneRank) {
      std::stable_partition(all.begin(), all.end(), [&](int32_t e) { return e / num_local == favoured / num_local; });
    }
    std::sort(all.begin(), all.begin() + shape.top_k);
    ids.insert(ids.end(), all.begin(), all.begin() + shape.top_k);
  }
  return ids;
}

// A call's arrays of all ranks, those of each behind those of the one before; on the host, and on the GPU.
class CallArrays {
 public:
  CallArrays(Rng& rng, const GroupShape& shape, const CallSpec& spec, std::vector<int32_t> chosen,
             device::MemorySpace& memory)
      : shape_(shape), memory_(memory), ids(std::move(chosen)) {
    for (const int64_t n : spec.num_tokens) first_.push_back(total), total += n;
    x = testing::as_tensor(testing::adversarial(rng, total, shape.hidden), DType::kBF16, {total, shape.hidden});
    shared = testing::as_tensor(testing::adversarial(rng, total, shape.hidden), DType::kBF16, {total, shape.hidden});
    if (spec.has_nans && total > 0) {  // the bits that mean no word, as a whole word and as half of one
      auto* values = x.as<uint16_t>() + rng.below(static_cast<uint64_t>(total)) * static_cast<uint64_t>(shape.hidden);
      values[4] = values[5] = values[7] = 0xFFFF;
    }
    for (size_t i = 0; i < ids.size(); ++i) routing.push_back(rng.below(8) == 0 ? 0 : rng.uniform());
    placed_x_ = x.clone_into(memory), placed_shared_ = shared.clone_into(memory);
    placed_ids_ = device::Buffer(ids.size() * 4, memory), placed_routing_ = device::Buffer(ids.size() * 4, memory);
    memory.upload(placed_ids_.data(), ids.data(), placed_ids_.size());
    memory.upload(placed_routing_.data(), routing.data(), placed_routing_.size());
    out_ = device::Buffer(static_cast<size_t>(total * shape.hidden * 2 + kGuard), memory);
    poison();
  }
  void poison() {
    const std::vector<uint8_t> poison(out_.size(), 0xFF);
    memory_.upload(out_.data(), poison.data(), poison.size());
  }
  // Of a rank, with this many tokens.
  RankExperts::Args args(int rank, int64_t num_tokens, const CallSpec& spec, const Weights& weights) const {
    const int64_t first = first_[static_cast<size_t>(rank)];
    const int64_t first_expert = rank * (shape_.num_experts / shape_.world);
    const auto rows = [&](void* data) {
      return TensorView{
          static_cast<uint16_t*>(data) + first * shape_.hidden, DType::kBF16, {num_tokens, shape_.hidden}};
    };
    RankExperts::Args args;
    args.routed.x = rows(placed_x_.view().data);
    args.routed.experts = placed_ids_.as<int32_t>() + first * shape_.top_k;
    args.routed.routing = placed_routing_.as<float>() + first * shape_.top_k;
    args.routed.w1 = weights.of(0, first_expert), args.routed.w3 = weights.of(1, first_expert);
    args.routed.w2 = weights.of(2, first_expert);
    if (spec.has_shared) args.shared = rows(placed_shared_.view().data);
    args.out = rows(out_.data());
    args.num_tokens = num_tokens, args.most_tokens = spec.most_tokens;
    return args;
  }
  std::vector<float> result() const {
    std::vector<uint16_t> bits(out_.size() / 2);
    memory_.download(bits.data(), out_.data(), out_.size());
    const auto end = bits.begin() + static_cast<std::ptrdiff_t>(total * shape_.hidden);
    EXPECT_EQ(std::count(end, bits.end(), 0xFFFF), bits.end() - end) << "behind the end";
    std::vector<float> values;
    std::for_each(bits.begin(), end, [&](uint16_t value) { values.push_back(numeric::bf16_to_float(value)); });
    return values;
  }

 private:
  static constexpr int64_t kGuard = 256;
  const GroupShape& shape_;
  device::MemorySpace& memory_;
  std::vector<int64_t> first_;
  device::Tensor placed_x_, placed_shared_;
  device::Buffer placed_ids_, placed_routing_, out_;

 public:
  int64_t total = 0;
  std::vector<int32_t> ids;
  std::vector<float> routing;
  device::Tensor x, shared;
};

// One rank with all experts and all tokens: Hopper's moe_experts, then moe_combine.
std::vector<float> expected_of(const GroupShape& shape, const CallArrays& call, bool has_shared,
                               const Weights& weights) {
  const ops::MoeExperts::Desc desc = shape.experts(0, shape.num_experts);
  std::vector<float> slots;
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!testing::is_on_gpu(variant) || std::string(variant.name) != "wgmma" || call.total == 0) return;
    slots = testing::run_experts(variant, desc, {call.x, call.ids, call.routing}, weights.on_host(), 0, call.total, 1);
  });
  const device::Tensor routed = testing::as_tensor(slots, DType::kBF16, {call.total, shape.top_k, shape.hidden});
  testing::PoisonedTensor sum(DType::kBF16, {call.total, shape.hidden});
  device::Queue queue(1);
  ops::moe_combine_reference({.hidden = shape.hidden, .top_k = shape.top_k},
                             {.routed = routed.view(),
                              .shared = has_shared ? call.shared.view() : TensorView{},
                              .out = sum.view(),
                              .num_tokens = call.total},
                             queue);
  return sum.floats();
}

// Which of a NaN's bits a sum keeps, no contract says.
std::vector<float> with_one_nan(std::vector<float> values) {
  for (float& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return values;
}

void RankExpertsTest::check(const GroupShape& shape, const std::vector<CallSpec>& calls) {
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  device::MemorySpace& memory = executor_->memory();
  const Weights weights(rng_, shape, memory);
  const Memories memories(shape, *executor_);
  std::vector<device::Buffer> workspaces;
  for (int r = 0; r < shape.world; ++r) {
    const RankExperts::Desc desc = shape.of_rank(r);
    std::string why_not;
    ASSERT_TRUE(variant.supports(desc, why_not)) << why_not;
    workspaces.emplace_back(static_cast<size_t>(variant.workspace_bytes(desc, shape.max_tokens)), memory);
    const std::vector<uint8_t> poison(workspaces.back().size(), 0xFF);
    memory.upload(workspaces.back().data(), poison.data(), poison.size());
  }
  for (const CallSpec& spec : calls) {
    SCOPED_TRACE(::testing::Message() << shape.of_rank(0).to_string() << ", tokens "
                                      << ::testing::PrintToString(spec.num_tokens));
    const int64_t total = std::accumulate(spec.num_tokens.begin(), spec.num_tokens.end(), int64_t{0});
    const CallArrays call(rng_, shape, spec, random_ids(shape, total, spec.routing), memory);
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
    EXPECT_TRUE(testing::same_bits(with_one_nan(call.result()),
                                   with_one_nan(expected_of(shape, call, spec.has_shared, weights))));
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
  device::Buffer workspaces[2];
  for (int r = 0; r < 2; ++r) {
    workspaces[r] = device::Buffer(static_cast<size_t>(variant.workspace_bytes(shape.of_rank(r), shape.max_tokens)),
                                   executor_->memory());
  }
  const CallSpec specs[] = {{{0, 3}}, {{2, 3}}, {{3, 1}}};
  std::vector<std::unique_ptr<CallArrays>> calls;
  for (const CallSpec& spec : specs) {
    const int64_t total = spec.num_tokens[0] + spec.num_tokens[1];
    calls.push_back(
        std::make_unique<CallArrays>(rng_, shape, spec, random_ids(shape, total, spec.routing), executor_->memory()));
  }
  const auto run = [&](size_t call, int rank, RankExpertsPart part) {
    const CallSpec& spec = specs[call];
    RankExperts::Args args = calls[call]->args(rank, spec.num_tokens[static_cast<size_t>(rank)], spec, weights);
    args.peers = &memories.of(rank), args.part = part, args.workspace = workspaces[rank].data();
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
  CallArrays call(rng_, shape, spec, random_ids(shape, 4, spec.routing), executor_->memory());
  device::Buffer workspaces[2];
  for (int r = 0; r < 2; ++r) {
    workspaces[r] = device::Buffer(static_cast<size_t>(variant.workspace_bytes(shape.of_rank(r), shape.max_tokens)),
                                   executor_->memory());
  }
  const auto recording = executor_->record([&] {
    for (const RankExpertsPart part : kParts) {
      for (int r = 0; r < 2; ++r) {
        RankExperts::Args args = call.args(r, spec.num_tokens[static_cast<size_t>(r)], spec, weights);
        args.peers = &memories.of(r), args.part = part, args.workspace = workspaces[r].data();
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

// Where kernels of two ranks run at once, whole calls wait for each other.
TEST_F(RankExpertsTest, RanksRunAtOnceOnTwoQueues) {
  if (testing::kGpuIsEmulated) GTEST_SKIP() << "an emulated GPU runs one kernel at a time";
  const GroupShape shape{.hidden = 1024, .inner = 512, .num_experts = 8, .max_tokens = 6};
  const ops::Variant<RankExperts>& variant = *hopper_variant<RankExperts>();
  const auto other = device::make_executor(device::machine_of("cuda"), 1);
  const Weights weights(rng_, shape, executor_->memory());
  const Memories memories(shape, *executor_);
  device::Buffer workspaces[2];
  for (int r = 0; r < 2; ++r) {
    workspaces[r] = device::Buffer(static_cast<size_t>(variant.workspace_bytes(shape.of_rank(r), shape.max_tokens)),
                                   executor_->memory());
  }
  for (const std::vector<int64_t>& num_tokens : std::vector<std::vector<int64_t>>{{6, 1}, {0, 5}, {2, 0}, {6, 6}}) {
    const CallSpec spec{num_tokens};
    const int64_t total = num_tokens[0] + num_tokens[1];
    const CallArrays call(rng_, shape, spec, random_ids(shape, total, spec.routing), executor_->memory());
    executor_->synchronize();
    for (int r = 0; r < 2; ++r) {
      RankExperts::Args args = call.args(r, num_tokens[static_cast<size_t>(r)], spec, weights);
      args.peers = &memories.of(r), args.workspace = workspaces[r].data();
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
  const CallArrays call(rng_, shape, spec, random_ids(shape, 4, spec.routing), executor_->memory());
  const device::Buffer workspace(static_cast<size_t>(variant.workspace_bytes(shape.of_rank(0), 2)),
                                 executor_->memory());
  RankExperts::Args args = call.args(0, 2, spec, weights);
  args.peers = &memories.of(0), args.workspace = workspace.data();
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
