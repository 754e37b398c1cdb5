// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of a few tokens over one sequence's ring and entries, by any variant and in any batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ops/attention/attention.h"
#include "testing/op_harness.h"

namespace tessera::testing {

class RingAttention {
 public:
  // A token at each position, which sees as many entries as `counts` says of it. Random rings of `slots`, entries,
  // queries and sinks.
  RingAttention(Rng& rng, const ops::Attention::Desc& desc, int64_t slots, std::vector<int64_t> positions,
                std::vector<int32_t> counts)
      : desc_(desc), slots_(slots), positions_(std::move(positions)), counts_(std::move(counts)) {
    const int64_t width = desc.head_dim, bytes = desc.layout.entry_bytes();
    const int64_t held = slots + *std::max_element(counts_.begin(), counts_.end());
    const std::vector<float> values = adversarial(rng, held, width);
    cache_.resize(static_cast<size_t>(held * bytes));
    for (int64_t i = 0; i < held; ++i) {
      ops::encode_entry(desc.layout, values.data() + i * width, cache_.data() + i * bytes);
    }
    q_ = as_tensor(adversarial(rng, num_tokens() * desc.heads, width), DType::kBF16, {num_tokens(), desc.heads, width});
    for (int64_t h = 0; h < desc.heads; ++h) sink_.push_back(rng.normal());
  }
  int64_t num_tokens() const { return std::ssize(positions_); }
  // The bytes of entry `index`.
  std::span<uint8_t> entry(int64_t index) {
    const int64_t bytes = desc_.layout.entry_bytes();
    return std::span(cache_).subspan(static_cast<size_t>((slots_ + index) * bytes), static_cast<size_t>(bytes));
  }

  // [count, heads, head_dim] of the tokens from `first`.
  std::vector<float> run(const ops::Variant<ops::Attention>& variant, int64_t first, int64_t count, int threads) const {
    device::Queue queue(threads);
    const device::Buffer workspace = workspace_for(variant, desc_, count);
    const Shape shape = {count, desc_.heads, desc_.head_dim};
    PoisonedTensor out(DType::kBF16, shape);
    variant.run(desc_,
                {.q = {q_.as<uint16_t>() + first * desc_.heads * desc_.head_dim, DType::kBF16, shape},
                 .positions = positions_.data() + first,
                 .window_cache = cache_.data(),
                 .window_slots = slots_,
                 .entry_cache = cache_.data() + slots_ * desc_.layout.entry_bytes(),
                 .num_entries = counts_.data() + first,
                 .sink = sink_.data(),
                 .out = out.view(),
                 .num_tokens = count,
                 .workspace = workspace.data()},
                queue);
    EXPECT_TRUE(out.is_guard_intact());
    return out.floats();
  }
  std::vector<float> reference() const {
    return run({"scalar", nullptr, nullptr, nullptr, ops::attention_reference}, 0, num_tokens(), 2);
  }
  // That these tokens by themselves have the bits that they have among `all`.
  void expect_rows(const ops::Variant<ops::Attention>& variant, std::span<const float> all, int64_t first,
                   int64_t count, int threads) const {
    const auto size = static_cast<size_t>(desc_.heads * desc_.head_dim);
    EXPECT_TRUE(same_bits(run(variant, first, count, threads),
                          all.subspan(static_cast<size_t>(first) * size, static_cast<size_t>(count) * size)))
        << count << " tokens from " << first << ", " << threads << " threads";
  }

 private:
  ops::Attention::Desc desc_;
  int64_t slots_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> cache_;
  device::Tensor q_;
  std::vector<float> sink_;
};

}  // namespace tessera::testing
