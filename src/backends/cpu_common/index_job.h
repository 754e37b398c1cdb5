// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an index score kernel is called with: plain data, so that kernel files need no contract header.
#include <cstdint>

namespace tessera::backends::cpu_common {

constexpr int64_t kIndexKeys = 64;    // of a job, at most
constexpr int64_t kIndexWidth = 256;  // of a key, at most; a multiple of kIndexStep
constexpr int64_t kIndexStep = 32;    // values that share an E2M1 scale

// scores[t * stride + j] for keys j of [0, num_keys) and tokens t with counts[t] > j.
struct IndexJob {
  const uint16_t* queries;     // [num_tokens, heads, width] BF16
  const float* weights;        // [num_tokens, heads], scaled and rounded
  const uint8_t* const* keys;  // [num_keys] addresses of entries: width/2 code bytes and width/32 scales, or BF16
  bool is_fp4;
  int64_t num_keys, heads, width, num_tokens;
  const int64_t* counts;  // [num_tokens]: keys of this job that the token sees
  int64_t stride;
  float* scores;
};

}  // namespace tessera::backends::cpu_common
