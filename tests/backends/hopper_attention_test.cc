// SPDX-License-Identifier: Apache-2.0
// Hopper's attention at 512 channels: against the reference, and a token's bits alone, spread over thread blocks, and
// among so many that it is not; windows that are not full, entries in pages, several sequences, rows that only fill a
// batch up, heads that fill no 64, and logits that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::EntryFormat;

constexpr int64_t kWidth = 512;

// A batch of two sequences and rows of nobody, whose places are a third's: an empty ring and one page.
struct Batch {
  int64_t heads = 0, slots = 0, stride = 0;
  int shift = 0;
  bool has_entries = false;  // else the layer has a window alone
  ops::Attention::Desc desc;
  std::vector<std::vector<uint8_t>> rings, pages;
  std::vector<const uint8_t*> ring_table, page_table;
  std::vector<int32_t> places, counts, selected;
  std::vector<int64_t> positions;
  std::vector<float> sink;
  device::Tensor q;
};

class HopperAttentionTest : public testing::RandomTest {
 protected:
  std::vector<uint8_t> entries(const ops::EntryLayout& layout, int64_t count) {
    const std::vector<float> values = testing::adversarial(rng_, count, layout.width);
    std::vector<uint8_t> bytes(static_cast<size_t>(count * layout.entry_bytes()));
    for (int64_t i = 0; i < count; ++i)
      ops::encode_entry(layout, values.data() + i * layout.width, bytes.data() + i * layout.entry_bytes());
    return bytes;
  }
  int64_t some(int64_t from, int64_t below) {
    return from + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(below)));
  }
  Batch batch(EntryFormat format, int64_t heads, int64_t window, int64_t tokens, int64_t most_entries,
              bool is_selected);
  // To the keys of `bytes`, one of `every` on average, a group with a scale of so many codes from `first` on.
  // code_mask: what is left of its codes.
  void make_great(const Batch& batch, std::vector<uint8_t>& bytes, int64_t every, int64_t group, int64_t first,
                  int64_t count, uint8_t code_mask);
  // is_great: outputs of 64 channels are near the reference each by themselves, where those are all finite.
  void check(const Batch& batch, float sink_shift = 0, bool is_great = false);
};

Batch HopperAttentionTest::batch(EntryFormat format, int64_t heads, int64_t window, int64_t tokens,
                                 int64_t most_entries, bool is_selected) {
  Batch b;
  b.heads = heads, b.has_entries = most_entries > 0, b.slots = window + tokens, b.shift = static_cast<int>(some(3, 4));
  b.desc = {
      .heads = heads, .head_dim = kWidth, .window = window, .scale = 0.044194174f, .layout = {format, kWidth, 64}};
  b.stride = (most_entries >> b.shift) + 1;
  const int64_t page_entries = int64_t{1} << b.shift;
  for (int place = 0; place < 3; ++place) b.rings.push_back(entries(b.desc.layout, b.slots));
  for (int64_t page = 0; page < 3 * b.stride; ++page) b.pages.push_back(entries(b.desc.layout, page_entries));
  for (const auto& ring : b.rings) b.ring_table.push_back(ring.data());
  for (const auto& page : b.pages) b.page_table.push_back(page.data());
  const int64_t first_positions[] = {0, some(0, 2000), 0};
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t place = t + 1 == tokens ? 2 : static_cast<int32_t>(t % 2);
    b.places.push_back(place);
    b.positions.push_back(first_positions[place] + (place == 2 ? 0 : t));
    // All, none, and around a part's edges.
    const int64_t kinds[] = {most_entries, 0, 127, 128, 129, some(0, most_entries + 1)};
    const int64_t count = place == 2 ? 0 : std::min(most_entries, kinds[t % 6]);
    b.counts.push_back(static_cast<int32_t>(count));
    if (!is_selected) continue;
    int64_t left = count;
    for (int64_t j = 0; j < most_entries && left > 0; ++j) {
      if (static_cast<int64_t>(rng_.below(static_cast<uint64_t>(most_entries - j))) >= left) continue;
      b.selected.push_back(static_cast<int32_t>(j));
      --left;
    }
    b.selected.resize(static_cast<size_t>((t + 1) * most_entries), -1);
  }
  for (int64_t h = 0; h < heads; ++h) b.sink.push_back(rng_.normal());
  b.q = testing::as_tensor(testing::adversarial(rng_, tokens * heads, kWidth), DType::kBF16, {tokens, heads, kWidth});
  return b;
}

void HopperAttentionTest::make_great(const Batch& b, std::vector<uint8_t>& bytes, int64_t every, int64_t group,
                                     int64_t first, int64_t count, uint8_t code_mask) {
  const auto entry_bytes = b.desc.layout.entry_bytes();
  const ops::KvOffsets at = ops::kv_offsets(b.desc.layout);
  for (int64_t entry = 0; entry < std::ssize(bytes) / entry_bytes; ++entry) {
    if (some(0, every) != 0) continue;
    uint8_t* key = bytes.data() + entry * entry_bytes;
    for (int64_t c = group * ops::kKvGroup; c < (group + 1) * ops::kKvGroup; ++c) key[c] &= code_mask;
    key[at.scales + group] = static_cast<uint8_t>(some(first, count));
  }
}

// Those 64 channels after another of which all expected are finite.
void expect_finite_close(std::span<const float> found, std::span<const float> expected) {
  constexpr size_t kGroup = static_cast<size_t>(ops::kKvGroup);
  // One key may be all of an output, and its probability rounded to the next number of BF16.
  constexpr double kBound = 4 * testing::kBf16Bound;
  size_t num_finite = 0;
  for (size_t i = 0; i < expected.size(); i += kGroup) {
    const auto group = expected.subspan(i, kGroup);
    if (!std::all_of(group.begin(), group.end(), [](float value) { return std::isfinite(value); })) continue;
    ++num_finite;
    EXPECT_TRUE(testing::is_close(found.subspan(i, kGroup), group, kBound)) << "from " << i << " on";
  }
  EXPECT_GT(num_finite, expected.size() / kGroup / 4);
}

void HopperAttentionTest::check(const Batch& b, float sink_shift, bool is_great) {
  const int64_t tokens = static_cast<int64_t>(b.places.size());
  const int64_t most_entries = b.selected.empty() ? 0 : static_cast<int64_t>(b.selected.size()) / tokens;
  std::vector<float> sink = b.sink;
  for (float& value : sink) value += sink_shift;
  const auto run = [&](const ops::Variant<ops::Attention>& variant, int64_t first, int64_t count) {
    device::Queue queue(2);
    const device::Buffer workspace = testing::workspace_for(variant, b.desc, count);
    testing::PoisonedTensor out(DType::kBF16, {count, b.heads, kWidth});
    variant.run(b.desc,
                {.q = {b.q.as<uint16_t>() + first * b.heads * kWidth, DType::kBF16, {count, b.heads, kWidth}},
                 .positions = b.positions.data() + first,
                 .window_cache = {b.ring_table.data(), b.places.data() + first},
                 .window_slots = b.slots,
                 .entry_cache = b.has_entries ? ops::PagedEntries<const uint8_t>(b.page_table.data(), b.stride,
                                                                                 b.places.data() + first, 0, b.shift)
                                              : ops::PagedEntries<const uint8_t>(),
                 .num_entries = b.has_entries ? b.counts.data() + first : nullptr,
                 .selected = b.selected.empty() ? nullptr : b.selected.data() + first * most_entries,
                 .selected_stride = most_entries,
                 .sink = sink.data(),
                 .out = out.view(),
                 .num_tokens = count,
                 .workspace = workspace.data()},
                queue);
    EXPECT_TRUE(out.is_guard_intact());
    return out.floats();
  };
  const ops::Variant<ops::Attention> scalar{"scalar", nullptr, nullptr, nullptr, ops::attention_reference};
  const std::vector<float> reference = run(scalar, 0, tokens);
  bool has_run = false;
  testing::for_each_variant<ops::Attention>(b.desc, [&](const ops::Variant<ops::Attention>& variant, bool) {
    if (std::string(variant.name) != "wgmma") return;
    has_run = true;
    const std::vector<float> all = run(variant, 0, tokens);
    std::vector<float> numbers = all, expected = reference;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!is_great) EXPECT_EQ(std::isnan(all[i]), std::isnan(reference[i])) << i;
      if (std::isnan(reference[i])) numbers[i] = expected[i] = 0;
    }
    if (is_great) {
      expect_finite_close(all, reference);
    } else {
      EXPECT_TRUE(testing::is_close(numbers, expected, testing::kBf16Bound));
    }
    const auto expect_same = [&](int64_t first, int64_t count) {
      const size_t row = static_cast<size_t>(b.heads * kWidth);
      EXPECT_TRUE(testing::same_bits_or_nan(
          run(variant, first, count),
          std::span(all).subspan(static_cast<size_t>(first) * row, static_cast<size_t>(count) * row)))
          << count << " tokens from " << first << " on, of " << tokens;
    };
    for (int64_t t = 0; t < std::min<int64_t>(tokens, 8); ++t) expect_same(t, 1);
    expect_same(tokens - 1, 1);
    expect_same(1, std::min<int64_t>(tokens - 1, 5));
    expect_same(tokens / 3, tokens / 2);
  });
  std::string why_not;
  const auto gpu = testing::find_test_gpu(why_not);
  EXPECT_EQ(has_run, gpu.has_value() && gpu->compute_major == 9);
}

TEST_F(HopperAttentionTest, FewTokens) {
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 7, 300, true));
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 11, 300, true));   // more than the portable kernel has
  check(batch(EntryFormat::kKvFp8Bf16, 16, 128, 2, 4300, false));  // parts that lanes don't have one of each
  check(batch(EntryFormat::kKvFp8Bf16, 37, 130, 6, 140, false));
  check(batch(EntryFormat::kBf16, 128, 128, 3, 129, true));
  if (testing::kGpuIsEmulated) return;
  // As many parts as the workspace holds of one token, almost; of two a block has all of them.
  check(batch(EntryFormat::kKvFp8Bf16, 16, 128, 2, 40000, false));
}

// A part to a token, whose channels are spread; and two.
TEST_F(HopperAttentionTest, WindowAlone) {
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 7, 0, false));
  check(batch(EntryFormat::kKvFp8Bf16, 128, 100, 20, 0, false));
  check(batch(EntryFormat::kBf16, 64, 200, 37, 0, false));
  if (testing::kGpuIsEmulated) return;
  check(batch(EntryFormat::kKvFp8Bf16, 128, 128, 300, 0, false));
}

// More than are spread over thread blocks.
TEST_F(HopperAttentionTest, ManyTokens) {
  if (testing::kGpuIsEmulated) return check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 66, 70, true));
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 44, 512, true));  // as many as are spread
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 64, 512, true));
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 9, 5000, false));  // some have more parts than the workspace holds
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 601, 130, true));
  check(batch(EntryFormat::kKvFp8Bf16, 128, 128, 333, 1024, true));
  check(batch(EntryFormat::kKvFp8Bf16, 64, 128, 800, 512, true));
  check(batch(EntryFormat::kBf16, 64, 128, 300, 700, false));
}

TEST_F(HopperAttentionTest, SinkFarAboveAndBelow) {
  const Batch one = batch(EntryFormat::kKvFp8Bf16, 16, 128, 3, 20, false);
  check(one, 60);
  check(one, -200);
}

// Queries whose products with every key are -inf: the sink alone is left, and outputs are zero.
TEST_F(HopperAttentionTest, LogitsOfMinusInfinity) {
  Batch one = batch(EntryFormat::kKvFp8Bf16, 16, 128, 4, 20, false);
  const auto refill = [&](std::vector<uint8_t>& bytes) {
    std::vector<float> key(kWidth);
    const auto entry_bytes = static_cast<size_t>(one.desc.layout.entry_bytes());
    for (size_t at = 0; at < bytes.size(); at += entry_bytes) {
      for (float& value : key) value = 0.5f + rng_.uniform();
      ops::encode_entry(one.desc.layout, key.data(), bytes.data() + at);
    }
  };
  for (auto& ring : one.rings) refill(ring);
  for (auto& page : one.pages) refill(page);
  constexpr uint16_t kMinusInfinity = 0xFF80;
  for (size_t t = 0; t < one.places.size(); ++t) {
    uint16_t* head = one.q.as<uint16_t>() + (t * 16 + t) * kWidth;
    std::fill_n(head, kWidth, uint16_t{0});
    head[5 + 100 * t] = kMinusInfinity;
  }
  check(one);
}

// The same code with values of other kinds.
class SlowHopperAttentionTest : public HopperAttentionTest {};

// Scales beyond what one BF16 factor holds, of small codes; some parts have none, some one.
TEST_F(SlowHopperAttentionTest, GreatScales) {
  Batch one = batch(EntryFormat::kKvFp8Bf16, 16, 128, 46, 150, false);
  for (int64_t group = 0; group < 7; ++group) {
    make_great(one, one.rings[0], 20, group, 134, 7, 0x83);
    for (auto& page : one.pages) make_great(one, page, 280, group, 134, 7, 0x83);
  }
  check(one);
}

// Scales up to the greatest, which queries do not see: outputs are great, and some sums are too great for FP32. Tokens
// have the kernel of a cluster alone, the portable one by five, and that of many all together.
TEST_F(SlowHopperAttentionTest, GreatestScales) {
  for (const bool is_selected : {false, true}) {
    Batch one = batch(EntryFormat::kKvFp8Bf16, 64, 128, 12, 150, is_selected);
    constexpr int64_t kGreat = 3, kTiny = 5;
    for (int64_t row = 0; row < 12 * one.heads; ++row)
      std::fill_n(one.q.as<uint16_t>() + row * kWidth + kGreat * ops::kKvGroup, ops::kKvGroup, uint16_t{0});
    const auto change = [&](std::vector<uint8_t>& bytes) {
      make_great(one, bytes, 4, kGreat, 120, 135, 0xBF);  // below 2
      make_great(one, bytes, 2, kTiny, 0, 4, 0xFF);
    };
    for (auto& ring : one.rings) change(ring);
    for (auto& page : one.pages) change(page);
    check(one, 0, true);
  }
}

// The same with a key that has an infinite value, which heads do not see, or see with a sign that leaves it no
// probability, and values whose products with queries are great.
TEST_F(SlowHopperAttentionTest, InfiniteValues) {
  Batch one = batch(EntryFormat::kKvFp8Bf16, 64, 128, 12, 150, false);
  constexpr int64_t kGreat = 6, kChannel = kGreat * ops::kKvGroup + 11;
  constexpr uint16_t kMinusOne = 0xBF80;
  for (int64_t row = 0; row < 12 * one.heads; ++row) {
    std::fill_n(one.q.as<uint16_t>() + row * kWidth + kGreat * ops::kKvGroup, ops::kKvGroup, uint16_t{0});
    if (row % 2 == 1) one.q.as<uint16_t>()[row * kWidth + kChannel] = kMinusOne;
  }
  for (auto& ring : one.rings) make_great(one, ring, 4, kGreat, 120, 135, 0xBF);
  uint8_t* key = one.pages[0].data() + std::ssize(one.pages[0]) - one.desc.layout.entry_bytes();
  for (int64_t c = kGreat * ops::kKvGroup; c < (kGreat + 1) * ops::kKvGroup; ++c) key[c] &= 0xBF;
  key[kChannel] = 0x7E;
  key[ops::kv_offsets(one.desc.layout).scales + kGreat] = 254;
  check(one, 0, true);
}

// A NaN among a key's codes or as a scale makes all outputs of its tokens NaN, and no other token's.
TEST_F(SlowHopperAttentionTest, NanInKeys) {
  const auto check_with = [&](int64_t tokens, int64_t byte, uint8_t code) {
    Batch one = batch(EntryFormat::kKvFp8Bf16, 16, 128, tokens, 150, false);
    std::vector<uint8_t>& page = one.pages[0];  // of every second token
    page[page.size() - static_cast<size_t>(one.desc.layout.entry_bytes() - byte)] = code;
    check(one);
  };
  check_with(10, 0, 0xFF);
  check_with(10, 447, 0x7F);
  check_with(46, 130, 0xFF);
  check_with(10, ops::kv_offsets({EntryFormat::kKvFp8Bf16, kWidth, 64}).scales + 5, 255);
}

}  // namespace
}  // namespace tessera
