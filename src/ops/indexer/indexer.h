// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lightning indexer's scores and selection.
//   score_j = sum_h w_h ReLU(q_h . key_j) for j < counts[t], FP32, heads ascending;
//   w_h = round(weights_h * width^-0.5 * heads^-0.5)
//   selection: the min(k, count) entries of largest score, ties to the lower index, in ascending index; rest -1.
// Source: DeepSeek-V4 inference/model.py, Indexer.forward; scores in FP32 rather than BF16 resolve ties.
#include <cstdint>
#include <string>

#include "ops/cache_entry.h"
#include "ops/paged_entries.h"
#include "ops/variant.h"

namespace tessera::ops {

struct IndexScores {
  static constexpr const char* kName = "index_scores";
  struct Desc {
    int64_t heads = 0, width = 0;
    EntryLayout keys;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView queries;                // [tokens, heads, width] activation
    TensorView weights;                // [tokens, heads] activation: weights_proj x
    PagedEntries<const uint8_t> keys;  // caches of index keys
    const int32_t* counts = nullptr;   // [tokens]: visible entries
    int64_t stride = 0;                // of scores, at least the largest count
    float* scores = nullptr;           // out [tokens, stride]
    int64_t num_tokens = 0;
    int64_t num_slices = 1;  // of how many sequences they are at most, each one's in a row: how work is dealt out
  };
};

struct TopK {
  static constexpr const char* kName = "top_k";
  struct Desc {
    int64_t k = 0;
    std::string to_string() const;
  };
  struct Args {
    const float* scores = nullptr;  // [tokens, stride]
    int64_t stride = 0;
    const int32_t* counts = nullptr;  // [tokens]
    int32_t* selected = nullptr;      // out [tokens, k]
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

constexpr int64_t kMaxIndexHeads = 1024;
bool index_scores_reference_supports(const IndexScores::Desc& desc, std::string& why_not);
void index_scores_reference(const IndexScores::Desc& desc, const IndexScores::Args& args, device::Queue& queue);
void top_k_reference(const TopK::Desc& desc, const TopK::Args& args, device::Queue& queue);

}  // namespace tessera::ops
