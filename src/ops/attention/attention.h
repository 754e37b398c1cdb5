// SPDX-License-Identifier: Apache-2.0
#pragma once
// One softmax over the sliding window and the compressed entries, with a sink; keys are values too.
//   z_n = (q . K_n) * scale;  o = sum_n exp(z_n - m) K_n / (sum_n exp(z_n - m) + exp(sink - m))
// Order: keys ascend, window by position, then entries by index. They form parts of at most kAttentionPart keys: the
// window's, then the entries' by rank in the list. Each part has its own maximum, sum and output (probabilities
// rounded to the activation dtype for the product with K, the sum of unrounded ones); parts merge in order, then the
// sink. So the result depends on the query's position and list only.
// Source: DeepSeek-V4 inference/model.py and kernel.py (sparse_attn); docs/contracts/numerics.md, section 4.
#include <cstdint>
#include <string>

#include "ops/cache_entry.h"
#include "ops/paged_entries.h"
#include "ops/variant.h"

namespace tessera::ops {

constexpr int64_t kAttentionPart = 128;
constexpr int64_t kMaxHeadDim = 512;

struct Attention {
  static constexpr const char* kName = "attention";
  struct Desc {
    int64_t heads = 0;  // of this rank
    int64_t head_dim = 0;
    int64_t window = 0;  // keys t-window+1 .. t
    float scale = 1;     // head_dim^-0.5
    EntryLayout layout;  // of window and entries
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView q;                               // [tokens, heads, head_dim] activation
    const int64_t* positions = nullptr;         // [tokens]
    SequenceBases<const uint8_t> window_cache;  // rings: position p lies in slot p mod window_slots
    int64_t window_slots = 0;                   // at least window - 1 and the tokens of a sequence
    PagedEntries<const uint8_t> entry_cache;    // compressed entries by index; none where the layer has none
    const int32_t* num_entries = nullptr;       // [tokens]: visible entries [0, n), or length of the token's list
    const int32_t* selected = nullptr;          // [tokens, selected_stride] ascending entry indices; null: all visible
    int64_t selected_stride = 0;
    const float* sink = nullptr;  // [heads] raw logits
    TensorView out;               // [tokens, heads, head_dim] activation
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

bool attention_reference_supports(const Attention::Desc& desc, std::string& why_not);
void attention_reference(const Attention::Desc& desc, const Attention::Args& args, device::Queue& queue);

}  // namespace tessera::ops
