// SPDX-License-Identifier: Apache-2.0
// What the prefix cache finds, what it keeps, and what it gives up, by itself; the simulator has it under requests.
#include "engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "engine/hash_runner.h"
#include "testing/seed.h"

namespace tessera::engine {
namespace {

constexpr int64_t kLongest = 2000, kPage = 16;
constexpr int64_t kPageBytes = kPage * HashRunner::kTokenBytes, kOwnBytes = HashRunner::kSnapshotBytes;

class PrefixCacheTest : public testing::Test {
 protected:
  PrefixCacheTest() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}
  std::vector<int32_t> random_ids(int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(rng_.below(kHashVocab));
    return ids;
  }
  static std::vector<int32_t> joined(std::vector<int32_t> first, const std::vector<int32_t>& then) {
    first.insert(first.end(), then.begin(), then.end());
    return first;
  }
  std::unique_ptr<model::SequenceState> run(const std::vector<int32_t>& ids) {
    auto state = runner_.new_sequence(kLongest);
    feed(*state, ids);
    return state;
  }
  void feed(model::SequenceState& state, std::span<const int32_t> ids) {
    const model::SequenceSlice slice{&state, ids, model::LogitRows::kNone};
    runner_.step({&slice, 1});
  }
  // Offers a state that has seen `ids`, as the end of a request would.
  void offer(PrefixCache& cache, const std::vector<int32_t>& ids, const Request& request = {}) {
    cache.offer(request, ids, *run(ids));
    cache.audit();
  }
  // How much of `ids` is known; what is found must be what a sequence of these tokens is.
  int64_t found(PrefixCache& cache, const std::vector<int32_t>& ids, const Request& request = {}) {
    const auto state = cache.find(request, ids, kLongest);
    cache.audit();
    if (state == nullptr) return 0;
    EXPECT_EQ(state->capacity(), kLongest);
    const std::span<const int32_t> rest = std::span(ids).subspan(static_cast<size_t>(state->position()));
    const int64_t position = state->position();
    feed(*state, rest);
    EXPECT_EQ(state->save(), run(ids)->save());
    return position;
  }

  uint64_t seed_;
  Rng rng_;
  testing::ScopedTrace trace_;
  PagedBudget budget_{kPage, int64_t{1} << 40};
  HashRunner runner_{kLongest, kLongest, budget_, {}, 1, {.page_tokens = kPage}};
};

TEST_F(PrefixCacheTest, FindsTheLongestBeginning) {
  PrefixCache cache(runner_, {.budget_bytes = 1 << 20, .least_gain_tokens = 1});
  const std::vector<int32_t> text = random_ids(800);
  const auto first = [&](int64_t count) { return std::vector<int32_t>(text.begin(), text.begin() + count); };
  EXPECT_EQ(found(cache, text), 0);
  const std::vector<int64_t> kept = {1, 40, 255, 256, 257, 511, 512, 700};
  for (const int64_t count : kept) offer(cache, first(count));
  EXPECT_EQ(cache.stats().num_snapshots, static_cast<int64_t>(kept.size()));
  for (int64_t length = 1; length <= 800; ++length) {
    const auto above = std::lower_bound(kept.begin(), kept.end(), length);  // not the whole
    ASSERT_EQ(found(cache, first(length)), above == kept.begin() ? 0 : *(above - 1)) << length;
  }
  // One that departs somewhere has everything up to there.
  for (int i = 0; i < 50; ++i) {
    const int64_t place = static_cast<int64_t>(rng_.below(800));
    std::vector<int32_t> other = text;
    other[static_cast<size_t>(place)] = (other[static_cast<size_t>(place)] + 1) % kHashVocab;
    const auto above = std::upper_bound(kept.begin(), kept.end(), place);
    ASSERT_EQ(found(cache, other), above == kept.begin() ? 0 : *(above - 1)) << place;
  }
}

TEST_F(PrefixCacheTest, SaltsAreApart) {
  PrefixCache cache(runner_, {.budget_bytes = 1 << 20});
  const std::vector<int32_t> text = random_ids(600);
  Request mine, theirs;
  mine.cache_salt = "mine", theirs.cache_salt = "theirs";
  offer(cache, text, mine);
  const std::vector<int32_t> longer = joined(text, {1, 2});
  EXPECT_EQ(found(cache, longer, theirs), 0);
  EXPECT_EQ(found(cache, longer), 0);
  EXPECT_EQ(found(cache, longer, mine), 600);
}

TEST(PrefixDigests, AreOfAllThatCameBefore) {
  std::vector<int32_t> ids(3 * kDigestTokens + 5);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const auto digests = prefix_digests("", ids);
  ASSERT_EQ(digests.size(), 4u);
  EXPECT_EQ(prefix_digests("", std::span(ids).first(2 * kDigestTokens)).back(), digests[2]);
  std::vector<int32_t> other = ids;
  other[3] = 7;
  const auto changed = prefix_digests("", other);
  EXPECT_EQ(changed[0], digests[0]);
  for (size_t i = 1; i < digests.size(); ++i) EXPECT_NE(changed[i], digests[i]) << i;
  EXPECT_NE(prefix_digests("x", ids)[0], digests[0]);
  // SHA-256 of "tessera prefix 1\n", by another implementation.
  const PrefixDigest expected = {0xb3, 0xa0, 0xea, 0xfc, 0x34, 0x8f, 0x87, 0x71, 0x15, 0x53, 0x4f,
                                 0xb7, 0xf0, 0x3b, 0x64, 0x83, 0xd3, 0xe5, 0x56, 0xb4, 0x57, 0x3b,
                                 0x7b, 0xda, 0x9e, 0xa4, 0x74, 0x3a, 0x8d, 0x3f, 0x4c, 0x96};
  EXPECT_EQ(digests[0], expected);
}

TEST_F(PrefixCacheTest, PagesCountOnceAndTheBudgetHolds) {
  // Room for two snapshots of 5 pages each that share nothing.
  PrefixCache cache(runner_, {.budget_bytes = 2 * (kOwnBytes + 5 * kPageBytes)});
  const auto state = runner_.new_sequence(kLongest);
  std::vector<int32_t> ids;
  for (int i = 0; i < 4; ++i) {
    const std::vector<int32_t> more = random_ids(16);
    feed(*state, more);
    ids = joined(ids, more);
    cache.offer({}, ids, *state);
    cache.audit();
    EXPECT_EQ(cache.stats().bytes, (i + 1) * (kOwnBytes + kPageBytes)) << "of whole pages, one more each";
  }
  EXPECT_EQ(cache.stats().num_evicted, 0);
  // Others come, and those go that were used the longest ago, until they fit.
  const std::vector<int32_t> second = random_ids(80), third = random_ids(80);
  offer(cache, second);
  EXPECT_EQ(cache.stats().num_evicted, 0);
  EXPECT_EQ(found(cache, joined(ids, {5})), 64);
  offer(cache, third);
  EXPECT_EQ(cache.stats().num_evicted, 4) << "three whose pages the longest one keeps, and the second";
  EXPECT_EQ(found(cache, joined(third, {5})), 80);
  EXPECT_EQ(found(cache, joined(second, {5})), 0);
  EXPECT_EQ(found(cache, joined(ids, {5})), 64);
  // One that is larger than all of it is not taken, and nothing goes for it.
  const int64_t num_evicted = cache.stats().num_evicted;
  offer(cache, random_ids(400));
  EXPECT_EQ(cache.stats().num_evicted, num_evicted);
}

TEST_F(PrefixCacheTest, TakesNoSnapshotThatGainsLittle) {
  PrefixCache cache(runner_, {.budget_bytes = 1 << 20, .interval_tokens = 100, .least_gain_tokens = 10});
  const std::vector<int32_t> text = random_ids(60);
  offer(cache, {text.begin(), text.begin() + 9});
  EXPECT_EQ(cache.stats().num_snapshots, 0);
  offer(cache, {text.begin(), text.begin() + 30});
  offer(cache, {text.begin(), text.begin() + 39});
  offer(cache, {text.begin(), text.begin() + 30});
  EXPECT_EQ(cache.stats().num_snapshots, 1);
  offer(cache, {text.begin(), text.begin() + 40});
  EXPECT_EQ(cache.stats().num_snapshots, 2);
  offer(cache, {text.begin(), text.begin() + 35});
  EXPECT_EQ(cache.stats().num_snapshots, 2);
  Request request;
  request.boundaries = {4, 12, 20, 22, 95, 130};
  std::vector<int64_t> offers;
  for (int64_t at = 0; at < 300;) offers.push_back(at = cache.next_offer(request, at));
  EXPECT_EQ(offers, (std::vector<int64_t>{12, 22, 95, 100, 130, 200, 300}));
}

TEST_F(PrefixCacheTest, ForgetsABeginningAndGivesUpTheOldest) {
  PrefixCache cache(runner_, {.budget_bytes = 1 << 20});
  const std::vector<int32_t> text = random_ids(600), other = random_ids(300);
  for (const int64_t count : {100, 300, 600}) offer(cache, {text.begin(), text.begin() + count});
  offer(cache, other);
  cache.forget({}, {text.begin(), text.begin() + 400});
  cache.audit();
  EXPECT_EQ(found(cache, joined({text.begin(), text.begin() + 500}, {1})), 0);
  EXPECT_EQ(found(cache, joined(text, {1})), 600) << "what has seen more is somebody else's";
  EXPECT_TRUE(cache.give_up());
  EXPECT_EQ(found(cache, joined(other, {1})), 0);
  EXPECT_TRUE(cache.give_up());
  EXPECT_FALSE(cache.give_up());
  EXPECT_EQ(cache.stats().bytes, 0);
  EXPECT_EQ(runner_.num_snapshots(), 0);
  EXPECT_EQ(runner_.num_pages(), 0);
}

// Calls that find no memory, or a device that fails, cost a snapshot or a hit, never a request.
TEST_F(PrefixCacheTest, LivesWithoutMemoryAndWithFaults) {
  HashRunner failing(kLongest, kLongest, budget_, {.snapshot = 3, .resume = 3}, seed_, {.page_tokens = kPage});
  PrefixCache cache(failing, {.budget_bytes = 1 << 20, .least_gain_tokens = 1});
  const auto state = failing.new_sequence(kLongest);
  const std::vector<int32_t> text = random_ids(100);
  for (size_t count = 1; count < text.size(); ++count) {
    const model::SequenceSlice slice{state.get(), std::span(text).subspan(count - 1, 1), model::LogitRows::kNone};
    failing.step({&slice, 1});
    cache.offer({}, std::span(text).first(count), *state);
    cache.audit();
    const auto again = cache.find({}, text, kLongest);
    cache.audit();
    EXPECT_TRUE(again == nullptr || again->position() <= static_cast<int64_t>(count));
  }
  EXPECT_GT(failing.failed().snapshot, 0);
  EXPECT_GT(failing.failed().resume, 0);
}

}  // namespace
}  // namespace tessera::engine
