// SPDX-License-Identifier: Apache-2.0
// Ops that work on caches: a batch of several sequences, found through a table of addresses, gives each sequence the
// bits that a call for it alone gives.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/reference_rows.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

constexpr int64_t kSequences = 3, kWidth = 128, kHeads = 4;
constexpr int32_t kPlaces[kSequences] = {2, 0, 3};  // of the table's four; nobody has place 1
constexpr int64_t kRows[kSequences] = {1, 3, 2};
constexpr int64_t kAllRows = 6;

// A table of caches, and the places of the batch's rows.
template <class T>
struct Caches {
  explicit Caches(int64_t values) : of_place(4, std::vector<T>(static_cast<size_t>(values))) {
    for (auto& cache : of_place) table.push_back(cache.data());
    for (int64_t s = 0; s < kSequences; ++s) places.insert(places.end(), static_cast<size_t>(kRows[s]), kPlaces[s]);
  }
  std::vector<std::vector<T>> of_place;
  std::vector<T*> table;
  std::vector<int32_t> places;
};

class SequenceBasesTest : public testing::RandomTest {
 protected:
  // Entries of random values in every cache.
  Caches<uint8_t> random_caches(const ops::EntryLayout& layout, int64_t entries) {
    Caches<uint8_t> caches(entries * layout.entry_bytes());
    for (auto& cache : caches.of_place) {
      const std::vector<float> values = testing::adversarial(rng_, entries, layout.width);
      for (int64_t i = 0; i < entries; ++i)
        ops::encode_entry(layout, values.data() + i * layout.width, cache.data() + i * layout.entry_bytes());
    }
    return caches;
  }
  device::Queue queue_{2};
};

TEST_F(SequenceBasesTest, CacheWriteLeavesOutRowsWithoutASlot) {
  const ops::CacheWrite::Desc desc{.layout = {ops::EntryFormat::kKvFp8Bf16, kWidth, 64}};
  const int64_t bytes = desc.layout.entry_bytes(), slots[kAllRows] = {3, 0, -1, 2, -1, 1};
  const device::Tensor rows =
      testing::as_tensor(testing::adversarial(rng_, kAllRows, kWidth), DType::kBF16, {kAllRows, kWidth});
  testing::for_each_variant<ops::CacheWrite>(desc, [&](const ops::Variant<ops::CacheWrite>& variant, bool) {
    Caches<uint8_t> caches(4 * bytes), expected(4 * bytes);
    for (int64_t i = 0; i < kAllRows; ++i) {
      if (slots[i] < 0) continue;
      float row[kWidth];
      ops::load_floats(rows, i * kWidth, kWidth, row);
      ops::encode_entry(
          desc.layout, row,
          expected.table[static_cast<size_t>(expected.places[static_cast<size_t>(i)])] + slots[i] * bytes);
    }
    const ops::SequenceBases<uint8_t> cache(caches.table.data(), caches.places.data());
    variant.run(desc, {.rows = rows, .slots = slots, .cache = cache, .num_rows = kAllRows}, queue_);
    EXPECT_EQ(caches.of_place, expected.of_place);
  });
}

TEST_F(SequenceBasesTest, Attention) {
  constexpr int64_t kSlots = 16, kEntries = 150;
  const ops::Attention::Desc desc{.heads = kHeads,
                                  .head_dim = kWidth,
                                  .window = 8,
                                  .scale = 0.125f,
                                  .layout = {ops::EntryFormat::kKvFp8Bf16, kWidth, 64}};
  const Caches<uint8_t> windows = random_caches(desc.layout, kSlots), entries = random_caches(desc.layout, kEntries);
  const device::Tensor q = testing::as_tensor(testing::adversarial(rng_, kAllRows * kHeads, kWidth), DType::kBF16,
                                              {kAllRows, kHeads, kWidth});
  const int64_t positions[kAllRows] = {5, 100, 101, 102, 30, 31};
  const int32_t counts[kAllRows] = {1, 25, 25, 150, 0, 129};
  const std::vector<float> sink(kHeads, 0.5f);
  testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool) {
    const auto run = [&](int64_t first, int64_t count, const ops::SequenceBases<const uint8_t>& window,
                         const ops::SequenceBases<const uint8_t>& entry) {
      testing::PoisonedTensor out(DType::kBF16, {count, kHeads, kWidth});
      const device::Buffer workspace = testing::workspace_for(variant, desc, count);
      variant.run(desc,
                  {.q = {q.as<uint16_t>() + first * kHeads * kWidth, DType::kBF16, {count, kHeads, kWidth}},
                   .positions = positions + first,
                   .window_cache = window,
                   .window_slots = kSlots,
                   .entry_cache = entry,
                   .num_entries = counts + first,
                   .sink = sink.data(),
                   .out = out.view(),
                   .num_tokens = count,
                   .workspace = workspace.data()},
                  queue_);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    const auto bases = [](const Caches<uint8_t>& caches) -> ops::SequenceBases<const uint8_t> {
      return ops::SequenceBases<uint8_t>(caches.table.data(), caches.places.data());
    };
    const std::vector<float> all = run(0, kAllRows, bases(windows), bases(entries));
    std::vector<float> alone;
    for (int64_t s = 0, row = 0; s < kSequences; row += kRows[s++]) {
      const size_t place = static_cast<size_t>(kPlaces[s]);
      const std::vector<float> part =
          run(row, kRows[s], windows.of_place[place].data(), entries.of_place[place].data());
      alone.insert(alone.end(), part.begin(), part.end());
    }
    EXPECT_TRUE(testing::same_bits(all, alone));
  });
}

TEST_F(SequenceBasesTest, IndexScores) {
  constexpr int64_t kKeys = 150;
  const ops::IndexScores::Desc desc{.heads = kHeads, .width = kWidth, .keys = {ops::EntryFormat::kIndexFp4, kWidth, 0}};
  const Caches<uint8_t> keys = random_caches(desc.keys, kKeys);
  const device::Tensor queries = testing::as_tensor(testing::adversarial(rng_, kAllRows * kHeads, kWidth), DType::kBF16,
                                                    {kAllRows, kHeads, kWidth});
  const device::Tensor weights =
      testing::as_tensor(testing::adversarial(rng_, kAllRows, kHeads), DType::kBF16, {kAllRows, kHeads});
  const int32_t counts[kAllRows] = {0, 64, 65, 66, 149, 150};
  testing::for_each_variant<ops::IndexScores>(desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
    const auto run = [&](int64_t first, int64_t count, const ops::SequenceBases<const uint8_t>& bases) {
      testing::PoisonedTensor out(DType::kF32, {count, kKeys});
      variant.run(desc,
                  {.queries = {queries.as<uint16_t>() + first * kHeads * kWidth, DType::kBF16, {count, kHeads, kWidth}},
                   .weights = {weights.as<uint16_t>() + first * kHeads, DType::kBF16, {count, kHeads}},
                   .keys = bases,
                   .counts = counts + first,
                   .stride = kKeys,
                   .scores = out.view().as<float>(),
                   .num_tokens = count},
                  queue_);
      EXPECT_TRUE(out.is_guard_intact());
      std::vector<float> seen;
      for (int64_t t = 0; t < count; ++t) {
        const float* row = out.view().as<float>() + t * kKeys;
        seen.insert(seen.end(), row, row + counts[first + t]);
      }
      return seen;
    };
    const std::vector<float> all = run(0, kAllRows, ops::SequenceBases<uint8_t>(keys.table.data(), keys.places.data()));
    std::vector<float> alone;
    for (int64_t s = 0, row = 0; s < kSequences; row += kRows[s++]) {
      const std::vector<float> part = run(row, kRows[s], keys.of_place[static_cast<size_t>(kPlaces[s])].data());
      alone.insert(alone.end(), part.begin(), part.end());
    }
    EXPECT_TRUE(testing::same_bits(all, alone));
  });
}

TEST_F(SequenceBasesTest, CompressorPool) {
  for (const int64_t ratio : {4, 128}) {
    const ops::CompressorPool::Desc desc{.ratio = ratio, .width = kWidth};
    const std::vector<float> values = testing::adversarial(rng_, kAllRows, desc.row_width()),
                             gates = testing::adversarial(rng_, kAllRows, desc.row_width()),
                             ape = testing::adversarial(rng_, ratio, desc.row_width());
    // The second slice completes an entry; one without rows changes nothing.
    const int64_t positions[kSequences] = {7 * ratio, 3 * ratio - 2, 0};
    std::vector<ops::CompressorSlice> slices;
    int32_t row = 0, entry = 0;
    for (int64_t s = 0; s < kSequences; ++s) {
      slices.push_back({.place = kPlaces[s],
                        .first_row = row,
                        .num_rows = static_cast<int32_t>(kRows[s]),
                        .first_entry = entry,
                        .first_position = positions[s]});
      row += static_cast<int32_t>(kRows[s]);
      entry += static_cast<int32_t>(ops::most_completed(ratio, kRows[s]));
    }
    slices.push_back({.place = 1});
    testing::for_each_variant<ops::CompressorPool>(desc, [&](const ops::Variant<ops::CompressorPool>& variant, bool) {
      Caches<float> states(desc.state_floats());
      for (float* state : states.table) ops::compressor_reset(desc, state);
      Caches<float> alone(desc.state_floats());
      for (float* state : alone.table) ops::compressor_reset(desc, state);
      testing::PoisonedTensor out(DType::kBF16, {entry, kWidth}), expected(DType::kBF16, {entry, kWidth});
      const auto run = [&](const ops::CompressorSlice* first, int64_t count, const ops::SequenceBases<float>& state,
                           const TensorView& entries) {
        variant.run(desc,
                    {.values = values.data(),
                     .gates = gates.data(),
                     .ape = ape.data(),
                     .state = state,
                     .slices = first,
                     .num_slices = count,
                     .entries = entries},
                    queue_);
      };
      run(slices.data(), static_cast<int64_t>(slices.size()), {states.table.data(), nullptr}, out.view());
      for (const ops::CompressorSlice& slice : slices) {
        run(&slice, 1, alone.table[static_cast<size_t>(slice.place)], expected.view());
      }
      EXPECT_TRUE(out.is_guard_intact());
      EXPECT_TRUE(testing::same_bits(out.floats(), expected.floats())) << "ratio " << ratio;
      for (size_t place = 0; place < states.table.size(); ++place)
        EXPECT_TRUE(testing::same_bits(states.of_place[place], alone.of_place[place])) << "place " << place;
    });
  }
}

TEST_F(SequenceBasesTest, FiniteCheckNamesTheFirst) {
  constexpr int64_t kLength = 5003;
  const ops::FiniteCheck::Desc desc{.width = kLength};
  std::vector<float> values = testing::adversarial(rng_, 5, kLength);
  for (float& value : values) value = std::isfinite(value) ? value : 0;
  const float inf = std::numeric_limits<float>::infinity();
  values[1 * kLength + 4711] = inf, values[1 * kLength + 4712] = std::nanf("");
  values[2 * kLength] = -inf;
  values[3 * kLength + kLength - 1] = std::nanf("");
  testing::for_each_variant<ops::FiniteCheck>(desc, [&](const ops::Variant<ops::FiniteCheck>& variant, bool) {
    std::vector<int32_t> first_bad(6, 77);
    variant.run(desc, {.values = values.data(), .first_bad = first_bad.data(), .num_rows = 5}, queue_);
    EXPECT_EQ(first_bad, (std::vector<int32_t>{-1, 4711, 0, kLength - 1, -1, 77}));
  });
}

}  // namespace
}  // namespace tessera
