// SPDX-License-Identifier: Apache-2.0
// Attention at the widths of Flash and Pro: every variant against the reference, and a token's bits alone and in a
// batch.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

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

// A NaN among an entry's codes makes all outputs of the tokens that see it NaN, and no other token's, at every width
// and with scales of every size beside it; what an entry is padded with means nothing.
TEST_F(SlowAttentionWidthsTest, NanInEntries) {
  constexpr int64_t kSlots = 140, kEntries = 20, kHeads = 16;
  bool has_run = false;
  for (const int64_t width : {64, 192, 320, 512}) {
    for (const int64_t rope : {0, 64}) {
      const ops::Attention::Desc desc{.heads = kHeads,
                                      .head_dim = width,
                                      .window = 128,
                                      .scale = 0.05f,
                                      .layout = {ops::EntryFormat::kKvFp8Bf16, width, rope}};
      const int64_t nope = desc.layout.nope_dim(), scales = ops::kv_offsets(desc.layout).scales;
      testing::RingAttention attention(rng_, desc, kSlots, {3, 150, 151, 900}, {12, 13, 20, 0});
      for (int64_t i = 0; i < kEntries; ++i) {
        for (auto& padding : attention.entry(i).subspan(static_cast<size_t>(scales + nope / ops::kKvGroup))) {
          padding = 0xFF;
        }
      }
      if (nope > 0) {
        // The second token sees the first NaN alone, which no scale of 2^8 or 2^-120 is beside among eight entries, as
        // many as a warp has; the other has both itself.
        attention.entry(12)[static_cast<size_t>(width == 192 ? 0 : nope - 1)] = 0x7F;
        attention.entry(17)[0] = 0xFF;
        attention.entry(17)[static_cast<size_t>(scales)] = 135;
        attention.entry(17)[static_cast<size_t>(scales + nope / ops::kKvGroup - 1)] = 7;
        // Those of tokens without a NaN are 2^-120 and 2^3.
        attention.entry(1)[static_cast<size_t>(scales + nope / ops::kKvGroup - 1)] = 7;
        attention.entry(2)[static_cast<size_t>(scales)] = 130;
      }
      const std::vector<float> reference = attention.reference();
      const auto row = static_cast<size_t>(kHeads * width);
      for (size_t t = 0; t < 4; ++t) {
        EXPECT_EQ(std::isnan(reference[t * row]), nope > 0 && (t == 1 || t == 2)) << t;
      }
      testing::for_each_variant<ops::Attention>(desc, [&](const ops::Variant<ops::Attention>& variant, bool is_ref) {
        const std::string name = variant.name;
        if (is_ref || (name != "mma" && name != "wgmma")) return;
        has_run = true;
        std::vector<float> all = attention.run(variant, 0, attention.num_tokens(), 1), expected = reference;
        for (size_t i = 0; i < all.size(); ++i) {
          ASSERT_EQ(std::isnan(all[i]), std::isnan(reference[i])) << width << " " << rope << " " << i;
          if (std::isnan(reference[i])) all[i] = expected[i] = 0;
        }
        EXPECT_TRUE(testing::is_close(all, expected, testing::kBf16Bound));
      });
    }
  }
  std::string why_not;
  EXPECT_EQ(has_run, testing::find_test_gpu(why_not).has_value());
}

}  // namespace
}  // namespace tessera
