// SPDX-License-Identifier: Apache-2.0
// Steps whose tokens are cut over ranks have the bits of steps that every rank does whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <tuple>

#include "backends/registry.h"
#include "comm/forwarded.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "model/layers/token_run.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

using tessera::testing::feed;
using tessera::testing::Forwarded;
using tessera::testing::run_ranks;
using ::testing::Each;

constexpr int64_t kStepTokens = 23;  // no multiple of the ranks

// Counts what a step asks for.
class Counting final : public Forwarded {
 public:
  using Forwarded::Forwarded;
  int num_sums = 0, num_shares = 0, num_gathers = 0;

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    ++num_sums;
    Forwarded::do_all_reduce(in, out, queue);
  }
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    ++num_gathers;
    Forwarded::do_all_gather(in, out, queue);
  }
  void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) override {
    ++num_gathers;
    Forwarded::do_gather_together(arrays, queue);
  }
  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    ++num_shares;
    Forwarded::do_reduce_scatter(in, out, queue);
  }
};

struct Cut {
  int world;
  AttentionSplit attention;
  ExpertSplit experts;
  bool keeps_all_heads = false;
};
constexpr Cut kCuts[] = {{2, AttentionSplit::kByGroup, ExpertSplit::kByWidth},
                         {2, AttentionSplit::kByGroup, ExpertSplit::kById},
                         {2, AttentionSplit::kWhole, ExpertSplit::kByWidth},
                         {4, AttentionSplit::kWhole, ExpertSplit::kById},
                         {2, AttentionSplit::kByGroup, ExpertSplit::kByWidth, true},
                         {2, AttentionSplit::kByGroup, ExpertSplit::kById, true}};

class TokenRunTest : public ::testing::Test {
 protected:
  void SetUp() override { testing::write_generated_model(testing::Generated::kT0, folder_.path()); }

  static void append(const TensorView& from, std::vector<float>& to) {
    to.insert(to.end(), from.as<float>(), from.as<float>() + from.shape.num_elements());
  }

  LoadedModel load(const Cut& cut, comm::Communicator& comm, int64_t fewest, ops::Precision precision,
                   bool with_draft = true, int64_t step_tokens = kStepTokens) const {
    LoadOptions options;
    options.precision = precision;
    options.num_threads = 1, options.max_step_tokens = step_tokens;
    options.with_draft = with_draft;
    options.comm = &comm;
    options.shard = {comm.rank(), cut.world, cut.attention, cut.experts, fewest, cut.keeps_all_heads};
    return load_model(folder_.path(), options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
  }

  // Of a step as large as there are, and the draft block behind it; of one that nobody wants logits of and the token
  // behind that; of a step of three sequences, of which one has a single token.
  std::vector<float> logits(const Cut& cut, comm::Communicator& comm, int64_t fewest, ops::Precision precision) const {
    const LoadedModel loaded = load(cut, comm, fewest, precision);
    Runner& runner = *loaded.runner;
    const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 2 * kStepTokens + 1);
    const std::span<const int32_t> all_ids(ids);
    const auto state = runner.new_sequence(64), other = runner.new_sequence(64), third = runner.new_sequence(64);
    std::vector<float> all = feed(runner, *state, all_ids.first(kStepTokens), LogitRows::kAll);
    const SequenceSlice next{state.get(), all_ids.subspan(1, kStepTokens), LogitRows::kAll};
    append(runner.draft({&next, 1}), all);
    feed(runner, *other, all_ids.subspan(kStepTokens, kStepTokens - 4), LogitRows::kNone);
    append(runner.step({{{other.get(), all_ids.first(1), LogitRows::kLast}}}), all);
    const std::vector<SequenceSlice> slices = {{state.get(), all_ids.subspan(kStepTokens, 11), LogitRows::kLast},
                                               {third.get(), all_ids.first(9), LogitRows::kNone},
                                               {other.get(), all_ids.last(1), LogitRows::kLast}};
    append(runner.step(slices), all);
    return all;
  }

  const testing::TemporaryFolder folder_;
};

TEST(TokenRun, RanksHaveConsecutiveRunsAndNoneIsEmpty) {
  const auto runs = [](int world, int64_t num_tokens) {
    std::vector<std::tuple<int64_t, int64_t, int64_t>> all;
    for (const auto& comm : comm::make_loopback(world, 1)) {
      const TokenRun run = cut_tokens(*comm, num_tokens);
      if (run.is_cut()) all.emplace_back(run.first, run.count, run.rows);
    }
    return all;
  };
  using Runs = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
  EXPECT_EQ(runs(2, 8), (Runs{{0, 4, 4}, {4, 4, 4}}));
  EXPECT_EQ(runs(3, 8), (Runs{{0, 3, 3}, {3, 3, 3}, {6, 2, 3}}));
  EXPECT_EQ(runs(4, 9), (Runs{})) << "three for each of the first three";
  EXPECT_EQ(runs(4, 3), (Runs{}));
  EXPECT_EQ(runs(8, 1024).size(), 8);
  EXPECT_EQ(runs(8, 1025).back(), (std::tuple<int64_t, int64_t, int64_t>{903, 122, 129}));
}

TEST_F(TokenRunTest, StepsHaveTheBitsOfWholeOnes) {
  for (const ops::Precision precision :
       {ops::Precision{ops::InputMode::kF32, ops::CacheMode::kExact}, ops::Precision{}}) {
    for (const Cut& cut : kCuts) {
      auto ranks = comm::make_loopback(cut.world, 120);
      EXPECT_THAT(run_ranks(ranks,
                            [&](comm::Communicator& comm, device::Queue&) {
                              Counting whole(comm), runs(comm);
                              const std::vector<float> expected = logits(cut, whole, kStepTokens + 1, precision);
                              EXPECT_EQ(whole.num_shares, 0);
                              EXPECT_TRUE(testing::same_bits(logits(cut, runs, cut.world, precision), expected));
                              const bool has_summands =
                                  (cut.attention == AttentionSplit::kByGroup && !cut.keeps_all_heads) ||
                                  cut.experts == ExpertSplit::kByWidth;
                              EXPECT_EQ(runs.num_shares > 0, has_summands);
                              EXPECT_GT(runs.num_gathers, whole.num_gathers);
                            }),
                  Each(""))
          << cut.world;
    }
  }
}

// Streams come together where logits are wanted alone; whoever looks at every output has whole steps.
TEST_F(TokenRunTest, StreamsComeTogetherForWhoReadsThem) {
  class Silent final : public Tracer {
   public:
    bool looks() const override { return false; }
    void tensor(std::string_view, const TensorView&) override {}
  };
  const Cut& cut = kCuts[0];
  auto ranks = comm::make_loopback(cut.world, 120);
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue&) {
                          Counting counting(comm);
                          const LoadedModel loaded = load(cut, counting, cut.world, {}, false);
                          const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 9);
                          const int64_t layers = loaded.config.num_layers;
                          const auto gathers_of = [&](LogitRows rows) {
                            const auto state = loaded.runner->new_sequence(16);
                            counting.num_gathers = counting.num_shares = 0;
                            feed(*loaded.runner, *state, ids, rows);
                            return counting.num_gathers;
                          };
                          EXPECT_EQ(gathers_of(LogitRows::kNone), 2 * layers);
                          EXPECT_EQ(counting.num_shares, 2 * layers);
                          const int head = gathers_of(LogitRows::kLast) - 2 * static_cast<int>(layers) - 1;
                          EXPECT_EQ(head, 1) << "of the vocabulary";
                          // More entries than are chosen: the choice of a rank's own tokens.
                          const std::vector<int32_t> more =
                              testing::generated_ids(testing::Generated::kT0, kStepTokens);
                          const auto longer = loaded.runner->new_sequence(kStepTokens);
                          counting.num_gathers = 0;
                          feed(*loaded.runner, *longer, more, LogitRows::kNone);
                          const auto& ratios = loaded.config.compress_ratios;
                          EXPECT_EQ(counting.num_gathers, 2 * layers + std::count(ratios.begin(), ratios.end(), 4));
                          Silent tracer;
                          loaded.runner->set_tracer(&tracer);
                          gathers_of(LogitRows::kNone);
                          EXPECT_EQ(counting.num_shares, 0);
                        }),
              Each(""));
}

// Of its own tokens a rank has attention's output whole and its choice alone: neither is summed or gathered.
TEST_F(TokenRunTest, AllHeadsNeedNoSumAndNoOtherChoice) {
  for (const Cut& cut : {Cut{2, AttentionSplit::kByGroup, ExpertSplit::kByWidth, true},
                         Cut{4, AttentionSplit::kWhole, ExpertSplit::kByWidth}}) {
    auto ranks = comm::make_loopback(cut.world, 120);
    EXPECT_THAT(run_ranks(ranks,
                          [&](comm::Communicator& comm, device::Queue&) {
                            Counting counting(comm);
                            const LoadedModel loaded = load(cut, counting, cut.world, {}, false);
                            const auto state = loaded.runner->new_sequence(kStepTokens);
                            counting.num_gathers = counting.num_shares = 0;
                            feed(*loaded.runner, *state, testing::generated_ids(testing::Generated::kT0, kStepTokens),
                                 LogitRows::kNone);
                            EXPECT_EQ(counting.num_shares, loaded.config.num_layers) << "of experts alone";
                            EXPECT_EQ(counting.num_gathers, 2 * loaded.config.num_layers);
                          }),
                Each(""));
  }
}

// Of more rows than a ring has room for, ranges that only the other rank's tokens look at are not written. What stays
// in the rings is, of each sequence of the step, and what the first of a rank's tokens look back at: rank 1 begins at
// row 1,400 of ranges of 512, and three rows behind the beginning of one.
TEST_F(TokenRunTest, WindowsThatNobodyLooksAtAreLeftOut) {
  const Cut cut{2, AttentionSplit::kByGroup, ExpertSplit::kByWidth, true};
  const std::pair<int64_t, int64_t> steps[] = {{2100, 700}, {1900, 154}};
  for (const auto& [first, second] : steps) {
    const auto logits_of = [&, first = first, second = second](comm::Communicator& comm, int64_t fewest) {
      const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, first + 4);
      const std::span<const int32_t> all(ids);
      const LoadedModel loaded = load(cut, comm, fewest, {}, false, first + second);
      Runner& runner = *loaded.runner;
      const auto one = runner.new_sequence(first + 4), other = runner.new_sequence(second + 4);
      std::vector<float> found;
      append(runner.step({{{one.get(), all.first(first), LogitRows::kLast},
                           {other.get(), all.first(second), LogitRows::kLast}}}),
             found);
      append(runner.step({{{one.get(), all.subspan(first, 3), LogitRows::kAll},
                           {other.get(), all.subspan(second, 3), LogitRows::kAll}}}),
             found);
      return found;
    };
    auto ranks = comm::make_loopback(cut.world, 120);
    EXPECT_THAT(run_ranks(ranks,
                          [&](comm::Communicator& comm, device::Queue&) {
                            EXPECT_TRUE(testing::same_bits(logits_of(comm, 1000), logits_of(comm, 3000)));
                          }),
                Each(""))
        << first;
  }
}

// Steps of fewer tokens than that are whole.
TEST_F(TokenRunTest, FewTokensAreNotCut) {
  auto ranks = comm::make_loopback(2, 120);
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue&) {
                          Counting counting(comm);
                          logits(kCuts[0], counting, LoadOptions{}.shard.fewest_tokens_to_cut, {});
                          EXPECT_EQ(counting.num_shares, 0);
                        }),
              Each(""));
}

}  // namespace
}  // namespace tessera::model
