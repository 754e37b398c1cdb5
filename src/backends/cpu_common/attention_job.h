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

}  // namespace tessera::backends::cpu_common
