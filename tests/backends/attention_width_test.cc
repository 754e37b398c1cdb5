// SPDX-License-Identifier: Apache-2.0
// Attention at the widths of Flash and Pro: every variant against the reference, and a token's bits alone and in a
// batch.
#include <gtest/gtest.h>

#include "backends/ring_attention.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

class SlowAttentionWidthsTest : public testing::RandomTest {};

TEST_F(SlowAttentionWidthsTest, FlashAndProHeads) {
  constexpr int64_t kWidth = 512, kEntries = 301, kSlots = 140;
  for (const int64_t heads : {64, 128, 37}) {
    const ops::Attention::Desc desc{.heads = heads,
                                    .head_dim = kWidth,
                                    .window = 128,
                                    .scale = 0.044194174f,
                                    .layout = {ops::EntryFormat::kKvFp8Bf16, kWidth, 64}};
    const testing::RingAttention attention(rng_, desc, kSlots, {0, 6, 126, 127, 1001}, {0, 1, 128, 129, kEntries});
    const std::vector<float> reference = attention.reference();
    testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool is_ref) {
      if (is_ref) return;
      const int64_t tokens = attention.num_tokens();
      const std::vector<float> all = attention.run(variant, 0, tokens, 1);
      EXPECT_TRUE(testing::is_close(all, reference, testing::kBf16Bound));
      for (int64_t t = 0; t < tokens; ++t) attention.expect_rows(variant, all, t, 1, static_cast<int>(1 + 2 * t));
    });
  }
}

}  // namespace
}  // namespace tessera
