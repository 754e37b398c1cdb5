// SPDX-License-Identifier: Apache-2.0
// Hopper's index scores: against the reference, the portable kernel's bits, and a token's bits alone and in a batch;
// keys in small and large pages, several sequences, neighbouring tokens that share keys and see more or fewer of them
// than the one before, counts around a tile's edges, and scales of every size.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "testing/op_harness.h"

namespace tessera {
namespace {

constexpr int64_t kHeads = 64, kWidth = 128, kSequences = 3;

struct Batch {
  ops::IndexScores::Desc desc{.heads = kHeads, .width = kWidth, .keys = {ops::EntryFormat::kIndexFp4, kWidth, 0}};
  std::vector<std::vector<uint8_t>> pages;
  std::vector<const uint8_t*> table;
  std::vector<int32_t> places, counts;
  int64_t most = 0, pages_each = 0, offset = 0;
  int shift = 0;
  device::Tensor queries, weights;
};

class HopperIndexScoresTest : public testing::RandomTest {
 protected:
  int64_t some(int64_t from, int64_t below) {
    return from + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(below)));
  }
  // Pages of 2^shift entries, `offset` bytes behind their begin; -1: of 8 to 128.
  Batch batch(int64_t tokens, int64_t most, int shift = -1, int64_t offset = 0);
  void check(const Batch& batch, bool has_finite_keys = true);
};

Batch HopperIndexScoresTest::batch(int64_t tokens, int64_t most, int shift, int64_t offset) {
  Batch b;
  b.most = most, b.shift = shift >= 0 ? shift : static_cast<int>(some(3, 5)), b.pages_each = (most >> b.shift) + 1;
  b.offset = offset;
  const int64_t entries = int64_t{1} << b.shift, num_pages = kSequences * b.pages_each;
  constexpr int64_t kMostDifferent = 256;
  for (int64_t page = 0; page < std::min(num_pages, kMostDifferent); ++page) {
    const std::vector<float> values = testing::adversarial(rng_, entries, kWidth);
    b.pages.emplace_back(static_cast<size_t>(offset + entries * b.desc.keys.entry_bytes()));
    uint8_t* const first = b.pages.back().data() + offset;
    for (int64_t i = 0; i < entries; ++i)
      ops::encode_entry(b.desc.keys, values.data() + i * kWidth, first + i * b.desc.keys.entry_bytes());
  }
  for (int64_t page = 0; page < num_pages; ++page)
    b.table.push_back(b.pages[static_cast<size_t>(page) % b.pages.size()].data());
  int32_t place = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    if (some(0, 3) == 0) place = static_cast<int32_t>(some(0, kSequences));
    b.places.push_back(place);
    const int64_t kinds[] = {most, most - 1, 0, 1, 63, 64, 65, 128, 257, some(0, most + 1)};
    b.counts.push_back(static_cast<int32_t>(std::min(most, kinds[some(0, std::size(kinds))])));
  }
  b.queries =
      testing::as_tensor(testing::adversarial(rng_, tokens * kHeads, kWidth), DType::kBF16, {tokens, kHeads, kWidth});
  b.weights = testing::as_tensor(testing::adversarial(rng_, tokens, kHeads), DType::kBF16, {tokens, kHeads});
  return b;
}

void HopperIndexScoresTest::check(const Batch& b, bool has_finite_keys) {
  const int64_t tokens = static_cast<int64_t>(b.places.size());
  // Scores that are seen, of the tokens from `first` on.
  const auto run = [&](const ops::Variant<ops::IndexScores>& variant, int64_t first, int64_t count) {
    device::Queue queue(2);
    testing::PoisonedTensor out(DType::kF32, {count, b.most});
    variant.run(b.desc,
                {.queries = {b.queries.as<uint16_t>() + first * kHeads * kWidth, DType::kBF16, {count, kHeads, kWidth}},
                 .weights = {b.weights.as<uint16_t>() + first * kHeads, DType::kBF16, {count, kHeads}},
                 .keys = {b.table.data(), b.pages_each, b.places.data() + first, b.offset, b.shift},
                 .counts = b.counts.data() + first,
                 .stride = b.most,
                 .scores = out.view().as<float>(),
                 .num_tokens = count},
                queue);
    EXPECT_TRUE(out.is_guard_intact());
    const std::vector<float> all = out.floats();
    std::vector<float> seen;
    for (int64_t t = 0; t < count; ++t) {
      const auto row = all.begin() + t * b.most, end = row + b.counts[static_cast<size_t>(first + t)];
      seen.insert(seen.end(), row, end);
      EXPECT_TRUE(std::all_of(end, row + b.most, [](float score) { return std::isnan(score); })) << "token " << t;
    }
    return seen;
  };
  std::optional<ops::Variant<ops::IndexScores>> wgmma, portable;
  std::vector<float> all;
  testing::for_each_variant<ops::IndexScores>(b.desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
    if (std::string(variant.name) != "wgmma") return;
    wgmma = variant;
    all = run(variant, 0, tokens);
    const auto expect_same = [&](int64_t first, int64_t count) {
      const auto begin = b.counts.begin() + first;
      const size_t before = static_cast<size_t>(std::accumulate(b.counts.begin(), begin, int64_t{0})),
                   size = static_cast<size_t>(std::accumulate(begin, begin + count, int64_t{0}));
      EXPECT_TRUE(testing::same_bits_or_nan(run(variant, first, count), std::span(all).subspan(before, size)))
          << count << " tokens from " << first << " on, of " << tokens;
    };
    for (int64_t t = 0; t < std::min<int64_t>(tokens, 4); ++t) expect_same(t, 1);
    expect_same(tokens / 3, (tokens + 1) / 2);
  });
  std::string why_not;
  const auto gpu = testing::find_test_gpu(why_not);
  EXPECT_EQ(wgmma.has_value(), gpu.has_value() && gpu->compute_major == 9);
  if (!wgmma.has_value()) return;
  testing::for_each_variant<ops::IndexScores>(b.desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
    if (std::string(variant.name) != "mma" || !testing::is_on_gpu(variant)) return;
    portable = variant;
    EXPECT_TRUE(testing::same_bits_or_nan(run(variant, 0, tokens), all));
  });
  EXPECT_TRUE(portable.has_value());
  if (!has_finite_keys) return;
  const ops::Variant<ops::IndexScores> scalar{"scalar", nullptr, nullptr, nullptr, ops::index_scores_reference};
  EXPECT_TRUE(testing::is_close(all, run(scalar, 0, tokens), testing::kF32Bound));
}

TEST_F(HopperIndexScoresTest, FewTokens) {
  check(batch(1, 700));
  check(batch(3, 300));
}

// Pages that hold whole tiles, of which a warpgroup takes many: they are copied ahead, in more turns than there are
// stages and than a warp has lanes, to the last key of a tile and beyond it.
TEST_F(HopperIndexScoresTest, FewTokensBehindALongContext) {
  const int64_t of_one = testing::kGpuIsEmulated ? 4000 : 150000;
  Batch one = batch(1, of_one, 6);
  for (const int64_t count : {of_one / 64 * 64, of_one / 64 * 64 + 1}) {
    one.counts[0] = static_cast<int32_t>(count);
    check(one);
  }
  // 33 tiles a warpgroup: of a GPU's 132 multiprocessors a third, or one of the emulated GPU's three.
  const auto of_several = static_cast<int32_t>(testing::kGpuIsEmulated ? 8500 : 380000);
  Batch several = batch(testing::kGpuIsEmulated ? 2 : 3, of_several, 7);
  std::ranges::fill(several.counts, of_several / 3);
  several.counts[0] = of_several;
  check(several, testing::kGpuIsEmulated);
}

// Where a bulk copy can begin, and where not.
TEST_F(HopperIndexScoresTest, KeysBehindOthersOfAPage) {
  check(batch(2, 500, 6, 48));
  check(batch(2, 500, 6, 4));
}

// So many that four are taken together, on the emulated GPU too.
TEST_F(HopperIndexScoresTest, TokensThatShareKeys) {
  check(batch(22, 500));
  Batch prompt = batch(26, 420);
  std::ranges::fill(prompt.places, 1);
  for (size_t t = 0; t < prompt.counts.size(); ++t) prompt.counts[t] = static_cast<int32_t>(200 + t / 4);
  check(prompt);
}

TEST_F(HopperIndexScoresTest, NobodySeesAKey) {
  Batch none = batch(5, 100);
  std::ranges::fill(none.counts, 0);
  check(none);
}

// Scales of 2^-127 to 2^127 and what is none, of tokens alone and together.
TEST_F(HopperIndexScoresTest, ScalesOfEverySize) {
  for (const int64_t tokens : {2, 23}) {
    Batch b = batch(tokens, 500, tokens == 2 ? 6 : -1);
    for (std::vector<uint8_t>& page : b.pages) {
      for (size_t at = kWidth / 2; at < page.size(); at += static_cast<size_t>(b.desc.keys.entry_bytes())) {
        for (size_t n = 0; n < kWidth / ops::kIndexGroup; ++n) page[at + n] = static_cast<uint8_t>(some(0, 256));
      }
    }
    check(b, false);
  }
}

}  // namespace
}  // namespace tessera
