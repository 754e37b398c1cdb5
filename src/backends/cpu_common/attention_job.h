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
  const uint8_t* entry_cache;
  int64_t num_entries;
  const int32_t* selected;  // null: entry r is key r
};

// Keys of a job that have a softmax of their own: `count` of the window from rank `first` on, or of the entries.
struct AttentionPart {
  bool is_window;
  int64_t first, count;
};

// What a part's keys, or all parts before, give: for each head a maximum, a sum of probabilities, and their product
// with the keys, [heads][width].
struct AttentionSums {
  float *max, *sum, *output;
};

// One instruction set's kernels. `whole` computes a job. The others are its steps, for as many threads as like to take
// part in one token: decode every part, then sums of every part, then join. They give the bits of `whole`.
struct AttentionKernels {
  void (*whole)(const AttentionJob& job);
  // Keys [begin, end) of a part to where `sums` reads them; multiples of kAttentionStep, keys behind the last are
  // zeros. Every step of a part must be decoded, up to a count of keys that is a multiple of 2 * kAttentionStep.
  void (*decode)(const AttentionJob& job, const AttentionPart& part, int64_t begin, int64_t end, void* decoded);
  void (*sums)(const AttentionJob& job, int64_t count, const void* decoded, const AttentionSums& sums);
  // Parts in order onto the sums `before`; the first begins them, the last ends in job.out. One head.
  void (*join)(const AttentionJob& job, const AttentionSums* parts, int64_t num_parts, const AttentionSums& before,
               bool is_first, bool is_last);
};
constexpr int64_t kAttentionStep = 16;
constexpr int64_t kAttentionJoined = 16;  // parts of a call of `join` at most
// Of decoded keys; 64-byte aligned.
constexpr int64_t kAttentionDecodedBytes = kAttentionWidth * kAttentionKeys * 4 + 64;

}  // namespace tessera::backends::cpu_common
