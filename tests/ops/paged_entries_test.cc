// SPDX-License-Identifier: Apache-2.0
// Ops on entries that lie in pages, in any order and anywhere, give the bits that they give on one array, and write
// nothing of a page but the entries that they are told to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/reference_rows.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

constexpr int64_t kSequences = 3, kWidth = 128, kHeads = 4, kPlaces = 5;
constexpr int64_t kRows[kSequences] = {1, 3, 2};
constexpr int64_t kAllRows = 6;

// Sequences with the same bytes twice: in an array each, and in pages shuffled over all of them.
struct BothWays {
  std::vector<std::vector<uint8_t>> arrays;  // by place
  std::vector<uint8_t*> array_table;
  std::vector<uint8_t> memory;  // of all pages
  std::vector<uint8_t*> page_table;
  std::vector<int32_t> places;  // of rows
  int64_t entry_bytes = 0, num_entries = 0, page_bytes = 0, stride = 0, offset = 0;
  int shift = 0;

  ops::SequenceBases<uint8_t> whole() const { return {array_table.data(), places.data()}; }
  ops::PagedEntries<uint8_t> paged() const { return {page_table.data(), stride, places.data(), offset, shift}; }
  uint8_t* paged_at(int32_t place, int64_t index) const {
    return page_table[static_cast<size_t>(place * stride + (index >> shift))] + offset +
           (index & ((1 << shift) - 1)) * entry_bytes;
  }
};

class PagedEntriesTest : public testing::RandomTest {
 protected:
  // `count` random entries of each of three sequences; `shift` as pages have it.
  BothWays random_entries(const ops::EntryLayout& layout, int64_t count, int shift) {
    BothWays both;
    both.entry_bytes = layout.entry_bytes(), both.num_entries = count, both.shift = shift;
    const int64_t per_page = int64_t{1} << shift, num_pages = ceil_div(count, per_page);
    both.stride = num_pages + static_cast<int64_t>(rng_.below(3));
    both.offset = 16 * static_cast<int64_t>(rng_.below(5));
    both.page_bytes = both.offset + per_page * both.entry_bytes + 48;
    both.memory.assign(static_cast<size_t>(kSequences * num_pages * both.page_bytes + 16), 0xFF);
    uint8_t* first = both.memory.data();
    first += (16 - reinterpret_cast<uintptr_t>(first) % 16) % 16;
    both.page_bytes = both.page_bytes / 16 * 16;
    std::vector<int64_t> order(static_cast<size_t>(kSequences * num_pages)), places(kPlaces);
    std::iota(order.begin(), order.end(), 0), std::iota(places.begin(), places.end(), 0);
    shuffle(order), shuffle(places);
    both.arrays.resize(kPlaces), both.array_table.resize(kPlaces), both.page_table.resize(kPlaces * both.stride);
    for (int64_t s = 0; s < kSequences; ++s) {
      const int32_t place = static_cast<int32_t>(places[static_cast<size_t>(s)]);
      both.places.insert(both.places.end(), static_cast<size_t>(kRows[s]), place);
      auto& array = both.arrays[static_cast<size_t>(place)];
      array.resize(static_cast<size_t>(count * both.entry_bytes));
      both.array_table[static_cast<size_t>(place)] = array.data();
      for (int64_t n = 0; n < num_pages; ++n) {
        both.page_table[static_cast<size_t>(place * both.stride + n)] =
            first + order[static_cast<size_t>(s * num_pages + n)] * both.page_bytes;
      }
      const std::vector<float> values = testing::adversarial(rng_, count, layout.width);
      for (int64_t i = 0; i < count; ++i) {
        uint8_t* entry = array.data() + i * both.entry_bytes;
        ops::encode_entry(layout, values.data() + i * layout.width, entry);
        std::memcpy(both.paged_at(place, i), entry, static_cast<size_t>(both.entry_bytes));
      }
    }
    return both;
  }
  void shuffle(std::vector<int64_t>& values) {
    for (size_t i = 0; i < values.size(); ++i) std::swap(values[i], values[i + rng_.below(values.size() - i)]);
  }
  int random_shift() { return static_cast<int>(rng_.below(8)); }
  device::Queue queue_{2};
};

TEST_F(PagedEntriesTest, CacheWrite) {
  constexpr int64_t kEntries = 150;
  for (const ops::EntryLayout& layout : {ops::EntryLayout{ops::EntryFormat::kKvFp8Bf16, kWidth, 64},
                                         ops::EntryLayout{ops::EntryFormat::kBf16, kWidth, 64},
                                         ops::EntryLayout{ops::EntryFormat::kIndexFp4, kWidth, 0}}) {
    const ops::CacheWrite::Desc desc{.layout = layout};
    const device::Tensor rows =
        testing::as_tensor(testing::adversarial(rng_, kAllRows, kWidth), DType::kBF16, {kAllRows, kWidth});
    const int shift = random_shift();
    testing::for_each_variant<ops::CacheWrite>(desc, [&](const ops::Variant<ops::CacheWrite>& variant, bool) {
      BothWays both = random_entries(layout, kEntries, shift);
      // The last entry is written, as a GPU's stage knows no more of a cache than slots say.
      std::vector<int64_t> slots(kEntries - 1);
      std::iota(slots.begin(), slots.end(), 0);
      shuffle(slots);
      slots.resize(kAllRows);
      slots[0] = kEntries - 1, slots[1] = -1;
      std::vector<uint8_t> expected = both.memory;
      for (size_t i = 0; i < kAllRows; ++i) {
        if (slots[i] < 0) continue;
        float row[kWidth];
        ops::load_floats(rows, static_cast<int64_t>(i) * kWidth, kWidth, row);
        ops::encode_entry(layout, row,
                          expected.data() + (both.paged_at(both.places[i], slots[i]) - both.memory.data()));
      }
      variant.run(desc, {.rows = rows, .slots = slots.data(), .cache = both.paged(), .num_rows = kAllRows}, queue_);
      EXPECT_EQ(both.memory, expected) << "shift " << shift;
    });
  }
}

TEST_F(PagedEntriesTest, Attention) {
  constexpr int64_t kSlots = 16, kEntries = 300, kSelected = 140;
  const ops::EntryFormat formats[] = {ops::EntryFormat::kKvFp8Bf16, ops::EntryFormat::kBf16};
  for (const bool is_selected : {true, false}) {
    const ops::Attention::Desc desc{.heads = kHeads,
                                    .head_dim = kWidth,
                                    .window = 8,
                                    .scale = 0.125f,
                                    .layout = {formats[rng_.below(2)], kWidth, 64}};
    const int shift = random_shift();
    const BothWays windows = random_entries(desc.layout, kSlots, 0);
    BothWays entries = random_entries(desc.layout, kEntries, shift);
    const device::Tensor q = testing::as_tensor(testing::adversarial(rng_, kAllRows * kHeads, kWidth), DType::kBF16,
                                                {kAllRows, kHeads, kWidth});
    const int64_t positions[kAllRows] = {5, 100, 101, 102, 30, 31};
    const int32_t counts[kAllRows] = {1, 25, 25, 140, 0, 129};
    std::vector<int32_t> selected;
    for (const int32_t count : counts) {
      std::vector<int64_t> list(kEntries);
      std::iota(list.begin(), list.end(), 0);
      shuffle(list);
      std::sort(list.begin(), list.begin() + count);
      for (int64_t i = 0; i < kSelected; ++i)
        selected.push_back(i < count ? static_cast<int32_t>(list[static_cast<size_t>(i)]) : -1);
    }
    const std::vector<float> sink(kHeads, 0.5f);
    testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool) {
      const auto run = [&](const ops::PagedEntries<const uint8_t>& cache) {
        testing::PoisonedTensor out(DType::kBF16, {kAllRows, kHeads, kWidth});
        const device::Buffer workspace = testing::workspace_for(variant, desc, kAllRows);
        variant.run(desc,
                    {.q = q,
                     .positions = positions,
                     .window_cache = windows.whole(),
                     .window_slots = kSlots,
                     .entry_cache = cache,
                     .num_entries = counts,
                     .selected = is_selected ? selected.data() : nullptr,
                     .selected_stride = kSelected,
                     .sink = sink.data(),
                     .out = out.view(),
                     .num_tokens = kAllRows,
                     .workspace = workspace.data()},
                    queue_);
        EXPECT_TRUE(out.is_guard_intact());
        return out.floats();
      };
      EXPECT_TRUE(testing::same_bits(run(entries.whole()), run(entries.paged()))) << "shift " << shift;
    });
  }
}

TEST_F(PagedEntriesTest, IndexScores) {
  constexpr int64_t kKeys = 300;
  for (const ops::EntryFormat format : {ops::EntryFormat::kIndexFp4, ops::EntryFormat::kBf16}) {
    const ops::IndexScores::Desc desc{.heads = kHeads, .width = kWidth, .keys = {format, kWidth, 0}};
    const int shift = random_shift();
    const BothWays keys = random_entries(desc.keys, kKeys, shift);
    const device::Tensor queries = testing::as_tensor(testing::adversarial(rng_, kAllRows * kHeads, kWidth),
                                                      DType::kBF16, {kAllRows, kHeads, kWidth});
    const device::Tensor weights =
        testing::as_tensor(testing::adversarial(rng_, kAllRows, kHeads), DType::kBF16, {kAllRows, kHeads});
    const int32_t counts[kAllRows] = {0, 64, 65, 66, 299, 300};
    testing::for_each_variant<ops::IndexScores>(desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
      const auto run = [&](const ops::PagedEntries<const uint8_t>& cache) {
        testing::PoisonedTensor out(DType::kF32, {kAllRows, kKeys});
        variant.run(desc,
                    {.queries = queries,
                     .weights = weights,
                     .keys = cache,
                     .counts = counts,
                     .stride = kKeys,
                     .scores = out.view().as<float>(),
                     .num_tokens = kAllRows},
                    queue_);
        EXPECT_TRUE(out.is_guard_intact());
        return out.floats();
      };
      EXPECT_TRUE(testing::same_bits(run(keys.whole()), run(keys.paged()))) << "shift " << shift;
    });
  }
}

// What may be written may be read, from where it lies, and no earlier.
TEST(PagedEntries, ReadOnlyOnesKnowWhereTheyLieAndWhoSaysSo) {
  ops::PagedEntries<uint8_t> entries;
  EXPECT_FALSE(ops::PagedEntries<const uint8_t>(entries).has_far);
  EXPECT_FALSE(ops::PagedEntries<const uint8_t>(entries).is_made_by_kernel);
  entries.has_far = true;
  EXPECT_TRUE(ops::PagedEntries<const uint8_t>(entries).has_far);
  EXPECT_FALSE(ops::PagedEntries<const uint8_t>(entries).is_made_by_kernel);
  entries.is_made_by_kernel = true;
  EXPECT_TRUE(ops::PagedEntries<const uint8_t>(entries).is_made_by_kernel);
}

}  // namespace
}  // namespace tessera
