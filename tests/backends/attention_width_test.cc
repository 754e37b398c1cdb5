// SPDX-License-Identifier: Apache-2.0
// Attention at the widths of Flash and Pro: every variant against the reference, and a token's bits alone and in a
// batch.
#include <gtest/gtest.h>

#include "testing/op_harness.h"

namespace tessera {
namespace {

class AttentionWidthTest : public testing::RandomTest {};

TEST_F(AttentionWidthTest, FlashAndProHeads) {
  constexpr int64_t kWidth = 512, kTokens = 5, kEntries = 301, kSlots = 140;
  for (const int64_t heads : {64, 128, 37}) {
    const ops::Attention::Desc desc{.heads = heads,
                                    .head_dim = kWidth,
                                    .window = 128,
                                    .scale = 0.044194174f,
                                    .layout = {ops::EntryFormat::kKvFp8Bf16, kWidth, 64}};
    const int64_t bytes = desc.layout.entry_bytes();
    const std::vector<float> values = testing::adversarial(rng_, kSlots + kEntries, kWidth);
    std::vector<uint8_t> cache(static_cast<size_t>((kSlots + kEntries) * bytes));
    for (int64_t i = 0; i < kSlots + kEntries; ++i)
      ops::encode_entry(desc.layout, values.data() + i * kWidth, cache.data() + i * bytes);
    const device::Tensor q =
        testing::as_tensor(testing::adversarial(rng_, kTokens * heads, kWidth), DType::kBF16, {kTokens, heads, kWidth});
    const int64_t positions[kTokens] = {0, 6, 126, 127, 1001};
    const int32_t counts[kTokens] = {0, 1, 128, 129, kEntries};
    std::vector<float> sink(static_cast<size_t>(heads));
    for (float& value : sink) value = rng_.normal();
    const auto run = [&](const ops::Variant<ops::Attention>& variant, int64_t first, int64_t count, int threads) {
      device::Queue queue(threads);
      const device::Buffer workspace = testing::workspace_for(variant, desc, count);
      testing::PoisonedTensor out(DType::kBF16, {count, heads, kWidth});
      variant.run(desc,
                  {.q = {q.as<uint16_t>() + first * heads * kWidth, DType::kBF16, {count, heads, kWidth}},
                   .positions = positions + first,
                   .window_cache = cache.data(),
                   .window_slots = kSlots,
                   .entry_cache = cache.data() + kSlots * bytes,
                   .num_entries = counts + first,
                   .sink = sink.data(),
                   .out = out.view(),
                   .num_tokens = count,
                   .workspace = workspace.data()},
                  queue);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    const ops::Variant<ops::Attention> scalar{"scalar", nullptr, nullptr, nullptr, ops::attention_reference};
    const std::vector<float> reference = run(scalar, 0, kTokens, 2);
    testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool is_ref) {
      if (is_ref) return;
      const std::vector<float> all = run(variant, 0, kTokens, 1);
      EXPECT_TRUE(testing::is_close(all, reference, testing::kBf16Bound));
      for (int64_t t = 0; t < kTokens; ++t) {
        const size_t size = static_cast<size_t>(heads * kWidth);
        EXPECT_TRUE(testing::same_bits(run(variant, t, 1, static_cast<int>(1 + 2 * t)),
                                       std::span(all).subspan(static_cast<size_t>(t) * size, size)))
            << "token " << t;
      }
    });
  }
}

}  // namespace
}  // namespace tessera
