// SPDX-License-Identifier: Apache-2.0
// Ranks that have one copy of compressed entries among them, against ranks of which each has all: the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "backends/registry.h"
#include "base/error.h"
#include "base/rng.h"
#include "comm/forwarded.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "model/load_model.h"
#include "model/model_helpers.h"
#include "model/sequence_caches.h"
#include "testing/compare.h"
#include "testing/seed.h"

namespace tessera::model {
namespace {

using tessera::testing::feed;
using tessera::testing::Forwarded;
using tessera::testing::random_ids;
using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";

// Which of its calls are barriers.
class Noted final : public Forwarded {
 public:
  using Forwarded::Forwarded;
  std::vector<bool> are_barriers;
  int num_words = 0;  // that ranks tell each other for a slab

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    are_barriers.push_back(false);
    Forwarded::do_all_reduce(in, out, queue);
  }
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    if (in.dtype == DType::kU8) {
      ++num_words;
    } else {
      are_barriers.push_back(false);
    }
    Forwarded::do_all_gather(in, out, queue);
  }
  void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) override {
    are_barriers.push_back(false);
    Forwarded::do_gather_together(arrays, queue);
  }
  void do_barrier(device::Queue& queue) override {
    are_barriers.push_back(true);
    Forwarded::do_barrier(queue);
  }
};

// The addresses of others' memory, the second word that ranks tell each other for it, lead nowhere.
class Strangers final : public Forwarded {
 public:
  using Forwarded::Forwarded;

 protected:
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    Forwarded::do_all_gather(in, out, queue);
    if (in.dtype != DType::kU8 || ++num_words_ != 2) return;
    // Behind size, tag, code and length lies the number of its process.
    out.as<uint8_t>()[(1 - rank()) * in.num_bytes() + 24 + 4] = 0x7F;
  }

 private:
  int num_words_ = 0;
};

LoadedModel load(comm::Communicator& comm, AttentionSplit attention, ExpertSplit experts, bool is_sharded,
                 int64_t step_tokens) {
  LoadOptions options;
  options.num_threads = 1;
  options.comm = &comm;
  options.max_step_tokens = step_tokens;
  options.shard = {.rank = comm.rank(),
                   .world = comm.world(),
                   .attention = attention,
                   .experts = experts,
                   .fewest_tokens_to_cut = 100,
                   .shards_entries = is_sharded};
  return load_model(kTiny, options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
}

// Sequences that grow by pieces, are copied, go back and end, some at once; all logits that came of it. The same for
// every rank and whatever the caches, by the seed.
std::vector<float> run_schedule(Runner& runner, int num_steps, uint64_t seed) {
  Rng rng(seed);
  constexpr int64_t kCapacity = 1200;
  const int32_t vocab = runner.facts().vocab_size;
  std::vector<float> logits;
  const auto add = [&](SequenceState& state, int64_t count, int64_t chunk = 256) {
    const std::vector<int32_t> ids = random_ids(rng, std::min(count, state.capacity() - state.position()), vocab);
    if (ids.empty()) return;
    const std::vector<float> more = feed(runner, state, ids, LogitRows::kLast, chunk);
    logits.insert(logits.end(), more.begin(), more.end());
  };
  std::vector<std::unique_ptr<SequenceState>> all;
  for (const int64_t count : {530, 60}) {
    all.push_back(runner.new_sequence(kCapacity));
    add(*all.back(), count, 1 + static_cast<int64_t>(rng.below(256)));
  }
  for (int step = 0; step < num_steps; ++step) {
    SequenceState& state = *all[rng.below(all.size())];
    switch (rng.below(5)) {
      case 0:
        add(state, 1 + static_cast<int64_t>(rng.below(120)));
        break;
      case 1:
        if (all.size() < 4) all.push_back(state.fork());
        break;
      case 2: {
        const auto mark = state.mark();
        add(state, 1 + static_cast<int64_t>(rng.below(120)));
        state.rollback(*mark);
        break;
      }
      case 3:
        if (all.size() > 2) all.pop_back();
        break;
      default: {  // a token of each
        const std::vector<int32_t> ids = random_ids(rng, static_cast<int64_t>(all.size()), vocab);
        std::vector<SequenceSlice> slices;
        for (size_t i = 0; i < all.size(); ++i) {
          if (all[i]->position() == kCapacity) continue;
          slices.push_back({all[i].get(), std::span(ids).subspan(i, 1), LogitRows::kLast});
        }
        const TensorView rows = runner.step(slices);
        logits.insert(logits.end(), rows.as<float>(), rows.as<float>() + rows.shape.num_elements());
      }
    }
  }
  return logits;
}

std::vector<std::vector<float>> run_all(int world, AttentionSplit attention, ExpertSplit experts, bool is_sharded,
                                        uint64_t seed) {
  auto ranks = comm::make_loopback(world, 240);
  std::vector<std::vector<float>> logits(ranks.size());
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue&) {
                          const LoadedModel loaded = load(comm, attention, experts, is_sharded, 256);
                          logits[static_cast<size_t>(comm.rank())] =
                              run_schedule(*loaded.runner, world == 2 ? 10 : 2, seed);
                          device::Queue queue(1);
                          comm.barrier(queue);  // nobody takes away what others still read
                        }),
              Each(""));
  return logits;
}

TEST(ShardedCaches, TheBitsAreThoseOfWholeOnes) {
  const uint64_t seed = tessera::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto expect_same = [&](int world, AttentionSplit attention, ExpertSplit experts) {
    const auto whole = run_all(world, attention, experts, false, seed);
    const auto sharded = run_all(world, attention, experts, true, seed);
    ASSERT_FALSE(whole[0].empty());
    for (size_t rank = 0; rank < sharded.size(); ++rank) {
      EXPECT_TRUE(testing::same_bits(sharded[rank], whole[0])) << world << " ranks, rank " << rank;
    }
  };
  expect_same(2, AttentionSplit::kByGroup, ExpertSplit::kByWidth);
  expect_same(4, AttentionSplit::kWhole, ExpertSplit::kById);
}

// A rank holds its part of the entries, and all of what else grows.
TEST(ShardedCaches, ARankHoldsItsPart) {
  auto ranks = comm::make_loopback(2, 60);
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue& queue) {
                          const LoadedModel whole = load(comm, AttentionSplit::kWhole, ExpertSplit::kById, false, 64);
                          const LoadedModel sharded = load(comm, AttentionSplit::kWhole, ExpertSplit::kById, true, 64);
                          const CacheSpec& a = whole.runner->cache_spec();
                          const CacheSpec& b = sharded.runner->cache_spec();
                          int64_t entries = 0;
                          for (const CacheKind& kind : a.kinds) {
                            if (kind.name.ends_with(".entries")) entries += kind.entry_bytes * (4096 / kind.ratio);
                          }
                          ASSERT_GT(entries, 0);
                          EXPECT_EQ(a.bytes(0), b.bytes(0));
                          EXPECT_EQ(a.bytes(4096) - b.bytes(4096), entries / 2);
                          EXPECT_LT(b.page_bytes, a.page_bytes);
                          EXPECT_EQ(a.snapshot_bytes, b.snapshot_bytes);
                          comm.barrier(queue);
                        }),
              Each(""));
}

// Before a step writes what others read all are done with the step before: its first call is a barrier, and its only
// one.
TEST(ShardedCaches, StepsWaitForAllRanks) {
  auto ranks = comm::make_loopback(2, 60);
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue&) {
                          for (const bool is_sharded : {false, true}) {
                            Noted noted(comm);
                            const LoadedModel loaded =
                                load(noted, AttentionSplit::kByGroup, ExpertSplit::kByWidth, is_sharded, 64);
                            const auto state = loaded.runner->new_sequence(64);
                            for (const std::vector<int32_t>& ids : {std::vector<int32_t>{1, 2, 3}, {4}}) {
                              noted.are_barriers.clear();
                              feed(*loaded.runner, *state, ids, LogitRows::kLast);
                              const std::vector<bool>& calls = noted.are_barriers;
                              ASSERT_GT(calls.size(), 2u);
                              EXPECT_EQ(calls.front(), is_sharded);
                              EXPECT_EQ(std::count(calls.begin(), calls.end(), true), is_sharded ? 1 : 0);
                            }
                            device::Queue queue(1);
                            comm.barrier(queue);
                          }
                        }),
              Each(""));
}

// What was reserved is there: nothing is asked of other ranks any more, whatever fits into the room.
TEST(ShardedCaches, ReservedRoomAsksNobody) {
  auto ranks = comm::make_loopback(2, 60);
  EXPECT_THAT(
      run_ranks(ranks,
                [&](comm::Communicator& comm, device::Queue& queue) {
                  Noted noted(comm);
                  const LoadedModel loaded = load(noted, AttentionSplit::kByGroup, ExpertSplit::kByWidth, true, 256);
                  Runner& runner = *loaded.runner;
                  const int64_t one = runner.cache_spec().bytes(1024);
                  const CacheRoom room{.running = 600 * one, .prefixes = one, .most_running = 3, .most_tokens = 1024};
                  // Pages for all of it, what three sequences have besides, and snapshots' own bytes.
                  const int64_t bytes = runner.reserved_bytes(room);
                  EXPECT_GE(bytes, room.running + 2 * room.prefixes + 3 * runner.cache_spec().bytes(0));
                  EXPECT_GT(runner.reserved_bytes({.running = 1200 * one, .most_running = 3}), bytes);
                  runner.meet_ranks();
                  EXPECT_LT(runner.reserved_bytes(room), bytes) << "the first slab is there";
                  runner.reserve(room);
                  EXPECT_LT(runner.reserved_bytes(room), bytes / 2);
                  const int words = noted.num_words;
                  std::vector<std::unique_ptr<SequenceState>> states;
                  Rng rng(1);
                  for (int i = 0; i < 3; ++i) {
                    states.push_back(runner.new_sequence(1024));
                    feed(runner, *states.back(), random_ids(rng, 600, runner.facts().vocab_size), LogitRows::kLast,
                         256);
                  }
                  EXPECT_EQ(noted.num_words, words);
                  EXPECT_GT(words, 3);
                  comm.barrier(queue);
                }),
      Each(""));
}

// Ranks that reach nobody's memory say so once they have loaded.
TEST(ShardedCaches, RanksThatDoNotReachEachOtherAreRefused) {
  auto ranks = comm::make_loopback(2, 60);
  const auto errors = run_ranks(ranks, [&](comm::Communicator& comm, device::Queue&) {
    Strangers strangers(comm);
    load(strangers, AttentionSplit::kByGroup, ExpertSplit::kByWidth, true, 64).runner->meet_ranks();
  });
  EXPECT_THAT(errors, Each(HasSubstr("caches sharded over ranks: memory of rank ")));
}

}  // namespace
}  // namespace tessera::model
