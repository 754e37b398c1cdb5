// SPDX-License-Identifier: Apache-2.0
// Sequences whose caches lie in pages: copies share them and never see each other's entries, memory follows what is
// used, and where it ends a step leaves everything as it was. On the host, and in memory that is not the host's.
#include <gtest/gtest.h>

#include "backends/registry.h"
#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "model/model_helpers.h"
#include "model/weight_source.h"
#include "testing/apart_executor.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/seed.h"

namespace tessera::model {
namespace {

enum class Place { kHost, kApart };

class PagesTest : public ::testing::TestWithParam<Place> {
 protected:
  PagesTest() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {
    if (GetParam() == Place::kHost) {
      runner_ = testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8).runner;
      return;
    }
    const Config config = load_config(testing::tiny_model());
    const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(testing::tiny_model());
    WeightSource weights(checkpoint, config, 0, Shard{}, nullptr, Inexact::kRound);
    ops::Planner planner(backends::all_backends(), device::probe_machine());
    auto executor = std::make_unique<testing::ApartExecutor>(2);
    executor_ = executor.get();
    runner_ = std::make_unique<Model>(config, planner, weights, ops::Precision{}, 0, 64, std::move(executor), Bypass{});
  }
  std::vector<int32_t> random_ids(int64_t count) {
    return testing::random_ids(rng_, count, runner_->facts().vocab_size);
  }
  void feed(SequenceState& state, const std::vector<int32_t>& ids) {
    testing::feed(*runner_, state, ids, LogitRows::kNone);
  }
  static const PagePool& pages_of(SequenceState& state) { return dynamic_cast<SequenceCaches&>(state).pool().pages(); }

  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
  std::unique_ptr<Runner> runner_;
  testing::ApartExecutor* executor_ = nullptr;  // with Place::kApart
};

TEST_P(PagesTest, CopiesAreIndependent) {
  constexpr int64_t kCapacity = 500, kLast = 3;
  struct Sequence {
    std::unique_ptr<SequenceState> state;
    std::vector<int32_t> ids;
  };
  std::vector<Sequence> all;
  const auto add = [&](Sequence& to, int64_t most) {
    const int64_t left = kCapacity - kLast - to.state->position();
    const std::vector<int32_t> ids = random_ids(std::min(left, 1 + static_cast<int64_t>(rng_.below(most))));
    feed(*to.state, ids);
    to.ids.insert(to.ids.end(), ids.begin(), ids.end());
  };
  // The first is about to leave its page, or just has, so that copies of it meet the edge.
  all.push_back({runner_->new_sequence(kCapacity), {}});
  all[0].ids = random_ids(kPageTokens - 20 + static_cast<int64_t>(rng_.below(40)));
  feed(*all[0].state, all[0].ids);
  for (int step = 0; step < 14; ++step) {
    const size_t i = rng_.below(all.size());
    switch (rng_.below(4)) {
      case 0:
        add(all[i], 60);
        break;
      case 1:
        if (all.size() >= 4) break;
        all.push_back({all[i].state->fork(), all[i].ids});
        if (rng_.below(2) == 0) add(all[i], 3);
        break;
      case 2: {  // forward, a copy of that, and back
        const auto mark = all[i].state->mark();
        Sequence other{nullptr, all[i].ids};
        std::swap(other.state, all[i].state);
        add(other, 60);
        auto copy = other.state->fork();
        other.state->rollback(*mark);
        std::swap(other.state, all[i].state);
        other.state = std::move(copy);
        if (all.size() < 4) all.push_back(std::move(other));
        break;
      }
      default:
        if (all.size() > 1) all.erase(all.begin() + static_cast<int64_t>(i));
    }
  }
  // All at once, as recorded or batched steps go, against each alone from its start.
  std::vector<std::vector<int32_t>> last;
  std::vector<SequenceSlice> slices;
  for (size_t i = 0; i < all.size(); ++i) last.push_back(random_ids(kLast));
  for (size_t i = 0; i < all.size(); ++i) slices.push_back({all[i].state.get(), last[i], LogitRows::kAll});
  const TensorView logits = runner_->step(slices);
  const std::vector<float> found(logits.as<float>(), logits.as<float>() + logits.shape.num_elements());
  const size_t values = static_cast<size_t>(kLast * runner_->facts().vocab_size);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto alone = runner_->new_sequence(kCapacity);
    feed(*alone, all[i].ids);
    const std::vector<float> expected = testing::feed(*runner_, *alone, last[i], LogitRows::kAll);
    const auto begin = found.begin() + static_cast<std::ptrdiff_t>(i * values);
    EXPECT_TRUE(testing::same_bits(std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(values)), expected))
        << "sequence " << i << " of " << all.size() << ", " << all[i].ids.size() << " tokens";
    EXPECT_EQ(all[i].state->save(), alone->save()) << "sequence " << i;
  }
}

TEST_P(PagesTest, MemoryFollowsWhatIsUsed) {
  auto a = runner_->new_sequence(4096);
  const PagePool& pages = pages_of(*a);
  EXPECT_EQ(pages.num_used(), 0);
  feed(*a, random_ids(200));
  const auto mark = a->mark();
  feed(*a, random_ids(56));
  EXPECT_EQ(pages.num_used(), 1);
  auto b = a->fork();
  EXPECT_EQ(pages.num_used(), 1) << "shared";
  feed(*a, random_ids(1));
  EXPECT_EQ(pages.num_used(), 2) << "a whole page is never copied";
  auto c = a->fork();
  feed(*c, random_ids(1));
  EXPECT_EQ(pages.num_used(), 3) << "a page that is not full is, by whoever writes first";
  feed(*a, random_ids(1));
  EXPECT_EQ(pages.num_used(), 3) << "and then has one owner";
  a->rollback(*mark);
  EXPECT_EQ(pages.num_used(), 2) << "what the rest needs";
  feed(*a, random_ids(1));
  EXPECT_EQ(pages.num_used(), 3) << "it is inside a page that others have too";
  b.reset();
  EXPECT_EQ(pages.num_used(), 3);
  c.reset();
  EXPECT_EQ(pages.num_used(), 1);
  const auto restored = runner_->restore(a->save());
  EXPECT_EQ(pages.num_used(), 2);
  a.reset();
  EXPECT_EQ(pages.num_used(), 1);
  EXPECT_LE(pages.num_used() + pages.num_free(), PagePool::pages_per_slab(pages.shape().bytes()));
}

// Snapshots hold what they were taken of: whoever goes on from one, with more room or just enough, has the bits of a
// text run from its start, whatever became of the sequence, of other copies and of other snapshots.
TEST_P(PagesTest, SnapshotsGoOnAsIfNothingHadHappened) {
  const int64_t window_end = 32, page = kPageTokens;
  const int64_t cuts[] = {1, 3, window_end - 1, window_end + 1, page - 1, page, page + 1, page + 130};
  const std::vector<int32_t> ids = random_ids(page + 140);
  const int64_t count = static_cast<int64_t>(ids.size());
  const auto alone = runner_->new_sequence(count);
  const std::vector<float> expected = testing::feed(*runner_, *alone, ids, LogitRows::kAll);
  const size_t vocab = static_cast<size_t>(runner_->facts().vocab_size);
  std::vector<std::unique_ptr<StateSnapshot>> snapshots;
  {
    auto state = runner_->new_sequence(count);
    for (const int64_t cut : cuts) {
      const std::span<const int32_t> next =
          std::span(ids).subspan(static_cast<size_t>(state->position()), static_cast<size_t>(cut - state->position()));
      testing::feed(*runner_, *state, next, LogitRows::kNone, 1 + static_cast<int64_t>(rng_.below(64)));
      snapshots.push_back(state->snapshot());
      EXPECT_EQ(snapshots.back()->position(), cut);
      EXPECT_LE(snapshots.back()->own_bytes(), runner_->cache_spec().snapshot_bytes);
      EXPECT_EQ(snapshots.back()->own_bytes() == runner_->cache_spec().snapshot_bytes, cut >= window_end - 1);
      EXPECT_EQ(static_cast<int64_t>(snapshots.back()->pages().size()), (cut + page - 1) / page);
      // The sequence goes on from its own snapshot now and then.
      if (rng_.below(2) == 0) state = runner_->resume(*snapshots.back(), count);
    }
  }
  // Two of each at once, one of which goes astray first.
  for (size_t i = 0; i < snapshots.size(); ++i) {
    const auto stray = runner_->resume(*snapshots[i], cuts[i] + 5);
    feed(*stray, random_ids(5));
    const auto state = runner_->resume(*snapshots[i], count);
    EXPECT_EQ(state->capacity(), count);
    const std::span<const int32_t> rest = std::span(ids).subspan(static_cast<size_t>(cuts[i]));
    const std::vector<float> found =
        testing::feed(*runner_, *state, rest, LogitRows::kAll, 1 + static_cast<int64_t>(rng_.below(64)));
    const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(cuts[i]) * vocab);
    EXPECT_TRUE(testing::same_bits(found, std::vector<float>(begin, expected.end()))) << "cut at " << cuts[i];
    EXPECT_THROW(runner_->resume(*snapshots[i], cuts[i] - 1), Error);
    EXPECT_THROW(runner_->resume(*snapshots[i], runner_->facts().max_positions + 1), Error);
  }
  const PagePool& pages = pages_of(*alone);
  EXPECT_GT(pages.num_used(), 2);
  snapshots.clear();
  EXPECT_EQ(pages.num_used(), 2) << "those of the one that is left";
}

std::vector<std::vector<uint8_t>> pages_saved(const StateSnapshot& snapshot, size_t page_bytes) {
  std::vector<std::vector<uint8_t>> pages(snapshot.pages().size(), std::vector<uint8_t>(page_bytes, 0xAB));
  for (size_t n = 0; n < pages.size(); ++n) snapshot.save_page(n, pages[n]);
  return pages;
}

// The bytes of a snapshot are those of its tokens alone, and what comes of them goes on with the same bits.
TEST_P(PagesTest, SnapshotsComeBackFromBytes) {
  const int64_t cuts[] = {1, 31, kPageTokens - 1, kPageTokens, kPageTokens + 130};
  const std::vector<int32_t> ids = random_ids(kPageTokens + 140);
  const int64_t count = static_cast<int64_t>(ids.size());
  const size_t page_bytes = static_cast<size_t>(runner_->cache_spec().page_bytes);
  feed(*runner_->new_sequence(600), random_ids(600));  // leaves its entries in pages that others get
  auto state = runner_->new_sequence(count);
  for (const int64_t cut : cuts) {
    const auto at = static_cast<size_t>(state->position());
    testing::feed(*runner_, *state, std::span(ids).subspan(at, static_cast<size_t>(cut) - at), LogitRows::kNone,
                  1 + static_cast<int64_t>(rng_.below(64)));
    const auto snapshot = state->snapshot();
    const std::vector<uint8_t> saved = snapshot->save();
    const std::vector<std::vector<uint8_t>> pages = pages_saved(*snapshot, page_bytes);
    const std::vector<std::span<const uint8_t>> spans(pages.begin(), pages.end());
    {
      const auto other = runner_->new_sequence(count);
      feed(*other, {ids.begin(), ids.begin() + cut});
      const auto same = other->snapshot();
      EXPECT_EQ(same->save(), saved) << cut;
      EXPECT_EQ(pages_saved(*same, page_bytes), pages) << cut;
    }
    const auto back = runner_->restore_snapshot(saved, spans);
    EXPECT_EQ(back->position(), cut);
    EXPECT_EQ(back->save(), saved);
    EXPECT_EQ(pages_saved(*back, page_bytes), pages);
    const auto resumed = runner_->resume(*back, count), expected = runner_->resume(*snapshot, count);
    const std::span<const int32_t> rest = std::span(ids).subspan(static_cast<size_t>(cut), 9);
    EXPECT_TRUE(testing::same_bits(testing::feed(*runner_, *resumed, rest, LogitRows::kAll, 4),
                                   testing::feed(*runner_, *expected, rest, LogitRows::kAll)));
    // What does not fit is refused.
    const auto refuses = [&](const std::vector<uint8_t>& bytes, std::span<const std::span<const uint8_t>> parts) {
      try {
        runner_->restore_snapshot(bytes, parts);
      } catch (const Error& error) {
        return error.code() == ErrorCode::kDataLoss;
      }
      return false;
    };
    EXPECT_TRUE(refuses(saved, std::span(spans).first(spans.size() - 1)));
    EXPECT_TRUE(refuses({saved.begin(), saved.end() - 1}, spans));
    EXPECT_TRUE(refuses({saved.begin(), saved.begin() + 20}, spans));
    for (const size_t header_byte : {0, 8, 23, 31}) {  // model, signs
      std::vector<uint8_t> damaged = saved;
      damaged[header_byte] ^= 0x81;
      EXPECT_TRUE(refuses(damaged, spans)) << header_byte;
    }
  }
}

class ApartPagesTest : public PagesTest {};

TEST_P(ApartPagesTest, WhereMemoryEndsAStepChangesNothing) {
  const auto a = runner_->new_sequence(600), b = runner_->new_sequence(600);
  const std::vector<int32_t> ids = random_ids(kPageTokens);
  feed(*a, ids), feed(*b, std::vector<int32_t>(ids.begin(), ids.begin() + 100));
  const auto copy = b->fork();
  // All pages but one are taken, and there is no memory for more: a needs one more, and b one of its own.
  const PagePool& pages = pages_of(*a);
  std::vector<std::unique_ptr<SequenceState>> takers;
  while (pages.num_free() > 1) {
    takers.push_back(runner_->new_sequence(kPageTokens));
    dynamic_cast<SequenceCaches&>(*takers.back()).make_room(0, 1);
  }
  executor_->memory().set_room(0);
  const std::vector<uint8_t> saved[] = {a->save(), b->save(), copy->save()};
  const std::vector<int32_t> next = random_ids(2);
  const SequenceSlice slices[] = {{a.get(), next, LogitRows::kAll}, {b.get(), next, LogitRows::kAll}};
  try {
    runner_->step(slices);
    ADD_FAILURE() << "there was no memory for that";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
  }
  EXPECT_EQ(pages.num_free(), 1);
  EXPECT_EQ(a->save(), saved[0]);
  EXPECT_EQ(b->save(), saved[1]);
  EXPECT_EQ(copy->save(), saved[2]);
  // One of them can go on, then nobody, and after more memory both, to what they would have been.
  EXPECT_NO_THROW(runner_->step(std::span(slices).first(1)));
  EXPECT_THROW(runner_->step(std::span(slices).last(1)), Error);
  executor_->memory().set_room(size_t{1} << 30);
  const std::vector<float> found = testing::feed(*runner_, *b, next, LogitRows::kAll);
  const std::vector<float> expected = testing::feed(*runner_, *copy, next, LogitRows::kAll);
  EXPECT_TRUE(testing::same_bits(found, expected));
}

// Of the owners of a page who all write into it in one step, the last one needs no copy; a snapshot never writes.
TEST_P(ApartPagesTest, ACommonStepTakesNoPageTooMany) {
  const auto a = runner_->new_sequence(600);
  feed(*a, random_ids(100));
  const auto b = a->fork(), c = a->fork();
  const PagePool& pages = pages_of(*a);
  std::vector<std::unique_ptr<SequenceState>> takers;
  while (pages.num_free() > 2) {
    takers.push_back(runner_->new_sequence(kPageTokens));
    dynamic_cast<SequenceCaches&>(*takers.back()).make_room(0, 1);
  }
  auto snapshot = a->snapshot();
  executor_->memory().set_room(0);
  const std::vector<int32_t> next = random_ids(1);
  const SequenceSlice slices[] = {
      {a.get(), next, LogitRows::kNone}, {b.get(), next, LogitRows::kNone}, {c.get(), next, LogitRows::kNone}};
  EXPECT_THROW(runner_->step(slices), Error) << "it keeps the page, so all three need their own";
  snapshot.reset();
  EXPECT_NO_THROW(runner_->step(slices)) << "two take the free ones, the third has the first one to itself";
  EXPECT_EQ(pages.num_free(), 0);
}

std::string name_of(const ::testing::TestParamInfo<Place>& one) {
  return one.param == Place::kHost ? "Host" : "Apart";
}
INSTANTIATE_TEST_SUITE_P(Memories, PagesTest, ::testing::Values(Place::kHost, Place::kApart), name_of);
INSTANTIATE_TEST_SUITE_P(Memories, ApartPagesTest, ::testing::Values(Place::kApart), name_of);

}  // namespace
}  // namespace tessera::model
