// SPDX-License-Identifier: Apache-2.0
// attention, cache entries and writes against a direct softmax in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/cache_write/cache_write.h"
#include "ops/reference_rows.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::EntryFormat;
using ops::EntryLayout;

class AttentionTest : public testing::RandomTest {
 protected:
  // Encoded random vectors, and what they decode to.
  struct Cache {
    std::vector<uint8_t> bytes;
    std::vector<float> values;
  };
  Cache cache(const EntryLayout& layout, int64_t count) {
    Cache out;
    out.bytes.resize(static_cast<size_t>(count * layout.entry_bytes()));
    out.values = testing::adversarial(rng_, count, layout.width);
    for (int64_t i = 0; i < count; ++i) {
      ops::encode_entry(layout, out.values.data() + i * layout.width, out.bytes.data() + i * layout.entry_bytes());
      ops::decode_entry(layout, out.bytes.data() + i * layout.entry_bytes(), out.values.data() + i * layout.width);
    }
    return out;
  }
  void check(const EntryLayout& layout, int64_t window, int64_t first_position, int64_t tokens, int64_t num_entries,
             bool is_selected, float sink);
};

void AttentionTest::check(const EntryLayout& layout, int64_t window, int64_t first_position, int64_t tokens,
                          int64_t num_entries, bool is_selected, float sink) {
  constexpr int64_t kHeads = 5;
  const int64_t width = layout.width, slots = window + tokens + 2;
  const bool is_f32 = layout.format == EntryFormat::kF32 || layout.format == EntryFormat::kKvFp8F32;
  const DType activation = is_f32 ? DType::kF32 : DType::kBF16;
  const ops::Attention::Desc desc{.heads = kHeads,
                                  .head_dim = width,
                                  .window = window,
                                  .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width))),
                                  .layout = layout,
                                  .activation = activation};
  // The ring holds the last `slots` positions.
  const Cache ring = cache(layout, slots), entries = cache(layout, std::max<int64_t>(1, num_entries));
  std::vector<float> q = testing::adversarial(rng_, tokens * kHeads, width);
  const device::Tensor queries = testing::as_tensor(q, activation, {tokens, kHeads, width});
  ops::load_floats(queries, 0, static_cast<int64_t>(q.size()), q.data());
  std::vector<int64_t> positions;
  std::vector<int32_t> counts, selected;
  std::vector<float> sinks(kHeads, sink);
  for (float& value : sinks) value += rng_.normal();
  for (int64_t t = 0; t < tokens; ++t) {
    positions.push_back(first_position + t);
    const int32_t count =
        static_cast<int32_t>(num_entries == 0 ? 0 : rng_.below(static_cast<uint64_t>(num_entries) + 1));
    counts.push_back(count);
    std::vector<int32_t> list;
    for (int32_t j = 0; j < num_entries; ++j) list.push_back(j);
    while (static_cast<int32_t>(list.size()) > count)
      list.erase(list.begin() + static_cast<int64_t>(rng_.below(list.size())));
    list.resize(static_cast<size_t>(std::max<int64_t>(1, num_entries)), -1);
    selected.insert(selected.end(), list.begin(), list.end());
  }
  const int64_t stride = std::max<int64_t>(1, num_entries);
  std::vector<float> expected;
  double largest_terms = 0;  // of a score: sum of |q k|
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<const float*> keys;
    for (int64_t p = std::max<int64_t>(0, positions[static_cast<size_t>(t)] - window + 1);
         p <= positions[static_cast<size_t>(t)]; ++p)
      keys.push_back(ring.values.data() + p % slots * width);
    for (int64_t n = 0; n < counts[static_cast<size_t>(t)]; ++n)
      keys.push_back(entries.values.data() + (is_selected ? selected[static_cast<size_t>(t * stride + n)] : n) * width);
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* row = q.data() + (t * kHeads + h) * width;
      std::vector<double> z;
      double max = static_cast<double>(sinks[static_cast<size_t>(h)]);
      for (const float* key : keys) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < width; ++c) {
          const double product = static_cast<double>(row[c]) * static_cast<double>(key[c]);
          sum += product, size += std::fabs(product);
        }
        largest_terms = std::max(largest_terms, size * static_cast<double>(desc.scale));
        z.push_back(sum * static_cast<double>(desc.scale));
        max = std::max(max, z.back());
      }
      double sum = std::exp(static_cast<double>(sinks[static_cast<size_t>(h)]) - max);
      std::vector<double> o(static_cast<size_t>(width));
      for (size_t n = 0; n < keys.size(); ++n) {
        const double p = std::exp(z[n] - max);
        sum += p;
        for (int64_t c = 0; c < width; ++c) o[static_cast<size_t>(c)] += p * static_cast<double>(keys[n][c]);
      }
      for (const double value : o) expected.push_back(static_cast<float>(value / sum));
    }
  }
  testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool) {
    const auto run = [&](int threads, int64_t begin, int64_t count) {
      device::Queue queue(threads);
      const device::Buffer workspace = testing::workspace_for(variant, desc, count);
      testing::PoisonedTensor out(activation, {count, kHeads, width});
      variant.run(desc,
                  {.q = {queries.as<char>() + begin * kHeads * width * dtype_bits(activation) / 8,
                         activation,
                         {count, kHeads, width}},
                   .positions = positions.data() + begin,
                   .window_cache = ring.bytes.data(),
                   .window_slots = slots,
                   .entry_cache = num_entries > 0 ? entries.bytes.data() : nullptr,
                   .num_entries = counts.data() + begin,
                   .selected = is_selected ? selected.data() + begin * stride : nullptr,
                   .selected_stride = stride,
                   .sink = sinks.data(),
                   .out = out.view(),
                   .num_tokens = count,
                   .workspace = workspace.data()},
                  queue);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    const std::vector<float> all = run(1, 0, tokens);
    // An FP32 score is off by up to 2^-24 of its terms, and its exponential by that share of itself.
    EXPECT_TRUE(testing::is_close(all, expected, is_f32 ? 2e-6 + 0x1p-24 * largest_terms : testing::kBf16Bound));
    EXPECT_TRUE(testing::same_bits(run(3, 0, tokens), all)) << "threads";
    for (int64_t t = 0; t < tokens; ++t)
      EXPECT_TRUE(testing::same_bits(
          run(t % 2 == 0 ? 6 : 2, t, 1),
          std::span(all).subspan(static_cast<size_t>(t * kHeads * width), static_cast<size_t>(kHeads * width))))
          << "token " << t << " alone";
  });
}

TEST_F(AttentionTest, AgainstADirectSoftmax) {
  for (const EntryFormat format :
       {EntryFormat::kF32, EntryFormat::kBf16, EntryFormat::kKvFp8Bf16, EntryFormat::kKvFp8F32}) {
    const EntryLayout layout{format, 192, 64};
    check(layout, 16, 0, 3, 0, false, 0);      // the first tokens: one key and more
    check(layout, 16, 40, 5, 0, false, 0);     // the ring has wrapped
    check(layout, 128, 300, 2, 7, true, 0);    // a window of exactly one part
    check(layout, 130, 500, 2, 3, false, 0);   // more than one part of window
    check(layout, 32, 900, 2, 129, false, 1);  // entries over a part's edge
    check(layout, 32, 900, 2, 257, true, -1);
  }
}

TEST_F(AttentionTest, SinkFarAboveAndBelow) {
  const EntryLayout layout{EntryFormat::kF32, 128, 64};
  check(layout, 16, 40, 2, 5, true, 80);
  check(layout, 16, 40, 2, 5, true, -200);
}

TEST_F(AttentionTest, EntriesKeepTheirBits) {
  EXPECT_EQ((EntryLayout{EntryFormat::kKvFp8Bf16, 512, 64}).entry_bytes(), 584);
  EXPECT_EQ((EntryLayout{EntryFormat::kIndexFp4, 128, 0}).entry_bytes(), 68);
  for (const EntryLayout& layout :
       {EntryLayout{EntryFormat::kKvFp8Bf16, 512, 64}, EntryLayout{EntryFormat::kKvFp8F32, 128, 64},
        EntryLayout{EntryFormat::kIndexFp4, 128, 0}, EntryLayout{EntryFormat::kBf16, 96, 32}}) {
    const Cache once = cache(layout, 20);
    std::vector<uint8_t> again(static_cast<size_t>(layout.entry_bytes()));
    for (int64_t i = 0; i < 20; ++i) {
      ops::encode_entry(layout, once.values.data() + i * layout.width, again.data());
      std::vector<float> back(static_cast<size_t>(layout.width));
      ops::decode_entry(layout, again.data(), back.data());
      EXPECT_TRUE(testing::same_bits(
          back,
          std::span(once.values).subspan(static_cast<size_t>(i * layout.width), static_cast<size_t>(layout.width))))
          << layout.to_string();
    }
  }
}

TEST_F(AttentionTest, CacheWriteTouchesItsSlotsOnly) {
  const ops::CacheWrite::Desc desc{.layout = {EntryFormat::kKvFp8Bf16, 128, 64}, .activation = DType::kBF16};
  const int64_t bytes = desc.layout.entry_bytes();
  const std::vector<float> x = testing::adversarial(rng_, 3, 128);
  const device::Tensor rows = testing::as_tensor(x, DType::kBF16, {3, 128});
  const int64_t slots[3] = {4, 0, 2};
  testing::for_each_variant<ops::CacheWrite>(desc, [&](const ops::Variant<ops::CacheWrite>& variant, bool) {
    std::vector<uint8_t> cache(static_cast<size_t>(6 * bytes), 0xA5), expected(cache);
    for (int64_t i = 0; i < 3; ++i) {
      float row[128];
      ops::load_floats(rows, i * 128, 128, row);
      ops::encode_entry(desc.layout, row, expected.data() + slots[i] * bytes);
    }
    device::Queue queue(2);
    variant.run(desc, {.rows = rows, .slots = slots, .cache = cache.data(), .num_rows = 3}, queue);
    EXPECT_EQ(cache, expected);
  });
}

}  // namespace
}  // namespace tessera
