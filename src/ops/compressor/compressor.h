// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pools runs of `ratio` tokens into one entry each, per channel, by a softmax over gate scores. Input rows are the FP32
// products a_t = wkv x_t and g_t = wgate x_t; s_t = g_t + ape[t mod ratio].
//   ratio != 4 (HCA)  rows of `width`; entry j pools tokens [j ratio, (j+1) ratio). Online softmax, one token at a time
//                     ascending: state max, sum, weighted sum per channel, also within a prefill.
//   ratio == 4 (CSA)  rows of 2 width; entry j pools the first half of the channels of window j-1 and the second half
//                     of window j, 8 rows ascending (4 for j = 0). State: raw rows of both windows.
// Entry j is complete with token (j+1) ratio - 1. Entries come out pooled only: norm, RoPE at position j * ratio and
// the cache's rounding follow.
// Source: DeepSeek-V4 inference/model.py, Compressor.forward and overlap_transform; report arXiv 2606.19348.
#include <cstdint>
#include <string>

#include "base/host_device.h"
#include "ops/sequence_bases.h"
#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

// Consecutive tokens of one sequence in a batch. Its entries lie in rows [first_entry, first_entry +
// most_completed(...)) of the output, so that where they lie depends on the batch's shape alone. One of no rows fills a
// recorded batch up: its place may have no state.
struct CompressorSlice {
  int32_t place = 0;      // of the sequence (SequenceBases)
  int32_t first_row = 0;  // of `values` and `gates`
  int32_t num_rows = 0;
  int32_t first_entry = 0;
  int64_t first_position = 0;
};

struct CompressorPool {
  static constexpr const char* kName = "compressor_pool";
  struct Desc {
    int64_t ratio = 0;
    int64_t width = 0;                // of an entry
    DType activation = DType::kBF16;  // of entries
    std::string to_string() const;
    int64_t row_width() const { return ratio == 4 ? 2 * width : width; }
    // FP32 values of the state of one sequence.
    int64_t state_floats() const { return ratio == 4 ? 24 * width : 3 * width; }
  };
  struct Args {
    const float* values = nullptr;  // [rows, row_width]: a
    const float* gates = nullptr;   // [rows, row_width]: g
    const float* ape = nullptr;     // [ratio, row_width]
    SequenceBases<float> state;     // [state_floats], updated; reset by compressor_reset at a sequence's start
    const CompressorSlice* slices = nullptr;  // [num_slices], of distinct sequences
    int64_t num_slices = 0;
    TensorView entries;  // out [rows, width] activation; a slice's rows behind its completed entries become 0
  };
};

// Entries that tokens [first_position, first_position + num_tokens) complete.
constexpr int64_t entries_completed(int64_t ratio, int64_t first_position, int64_t num_tokens) {
  return (first_position + num_tokens) / ratio - first_position / ratio;
}

// The most entries that `num_tokens` tokens complete, wherever they begin.
TESSERA_HOST_DEVICE constexpr int64_t most_completed(int64_t ratio, int64_t num_tokens) {
  return (num_tokens + ratio - 1) / ratio;
}

// The state before position 0.
void compressor_reset(const CompressorPool::Desc& desc, float* state);

void compressor_pool_reference(const CompressorPool::Desc& desc, const CompressorPool::Args& args,
                               device::Queue& queue);

}  // namespace tessera::ops
