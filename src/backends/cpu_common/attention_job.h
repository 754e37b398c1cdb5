// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an attention kernel is called with: plain data, so that kernel files need no contract header.
#include <cstdint>

namespace tessera::backends::cpu_common {

constexpr int64_t kAttentionKeys = 128;   // most keys of a part: ops::kAttentionPart
constexpr int64_t kAttentionWidth = 512;  // of a head, at most; a multiple of kAttentionChunk
constexpr int64_t kAttentionChunk = 64;   // values that share an E4M3 scale
constexpr int64_t kAttentionHeads = 64;   // of a job, at most

// Some heads of one token. Keys: window positions ascending, then entries by rank in the list.
struct AttentionJob {
  const uint16_t* q;  // [num_heads, width] BF16
  const float* sink;  // [num_heads]
  uint16_t* out;      // [num_heads, width] BF16
  int64_t num_heads, width;
  float scale;
  // An entry: nope E4M3 codes, (width - nope) BF16 values, nope / 64 scales; nope 0: BF16 throughout.
  int64_t nope, entry_bytes;
  const uint8_t* window_cache;
  int64_t window_slots, window_begin, window_count;
  // Compressed entries: `entries`, or (null) 1 << entry_shift of them in each page, from byte entry_offset on.
  const uint8_t* entries;
  const uint8_t* const* entry_pages;
  int64_t entry_offset;
  int entry_shift;
  int64_t num_entries;
  const int32_t* selected;  // null: entry r is key r
};

// Keys of a job that have a softmax of their own: `count` of the window from rank `first` on, or of the entries.
struct AttentionPart {
  bool is_window;
  int64_t first, count;
};

// What the parts before give: for each head a maximum, a sum of probabilities, and their product with the keys,
// [heads][width].
struct AttentionSums {
  float *max, *sum, *output;
};

// A part on its way through the steps. `softmax`: one for every 64 heads.
struct AttentionPartState {
  AttentionPart keys;
  void *decoded, *softmax;
};

// One instruction set's kernels. `whole` computes a job. The others are its steps, for as many threads as like to take
// part in one token: each after all of the one before. They give the bits of `whole`.
struct AttentionKernels {
  void (*whole)(const AttentionJob& job);
  // Decodes kAttentionStep keys of a part from key `begin` on, and multiplies them with all heads. Every step of a part
  // must be taken, up to a count of keys that is a multiple of 2 * kAttentionStep.
  void (*logits)(const AttentionJob& job, const AttentionPartState& part, int64_t begin);
  // The probabilities of a part for kAttentionStep heads from `head` on.
  void (*softmax)(const AttentionJob& job, const AttentionPartState& part, int64_t head);
  // `columns` values of up to 64 heads from `head` on: parts in order onto the sums `before` (null: none), which ends
  // in job.out (`after` null) or in the sums `after`. Both may have one `output`.
  void (*output)(const AttentionJob& job, const AttentionPartState* parts, int64_t num_parts, int64_t head,
                 int64_t column, const AttentionSums* before, const AttentionSums* after);
  int64_t columns;
};
constexpr int64_t kAttentionStep = 16;
// Of a part's decoded keys, and of the softmax of 64 heads; 64-byte aligned.
constexpr int64_t kAttentionDecodedBytes = kAttentionWidth * kAttentionKeys * 4 + 64;
constexpr int64_t kAttentionSoftmaxBytes = kAttentionHeads * (kAttentionKeys * 10 + 8);

}  // namespace tessera::backends::cpu_common
