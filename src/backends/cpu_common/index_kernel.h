// SPDX-License-Identifier: Apache-2.0
#pragma once
// Index scores of a block of keys, which lie across lanes: each key is decoded once for all tokens and heads, and the
// sum over heads stays inside a lane. Included by kernel files only: all names are local to the file. Math as in
// attention_kernel.h, with decode_fp4 for 32 values, and
//   kKeyVecs, kQueryRows   register tile: keys x heads
#include "backends/cpu_common/index_job.h"
#include "backends/cpu_common/unit_products.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::cpu_common {

namespace {

template <class Math, int kRows>
void add_heads(const uint32_t* keys, const uint32_t* queries, int64_t steps, const float* weights,
               typename Math::Vec* scores) {
  using Vec = typename Math::Vec;
  constexpr int kVecs = Math::kKeyVecs;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[r][v] = Math::all(0);
  }
  add_unit_products<Math>(sums, keys, kIndexKeys, queries, steps);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec positive = Math::max(Math::all(0), sums[r][v]);  // a NaN passes through
      scores[v] = Math::add(scores[v], Math::mul(Math::all(weights[r]), positive));
    }
  }
}

template <class Math>
void index_scores(const IndexJob& job) {
  using Vec = typename Math::Vec;
  constexpr int64_t kMaxSteps = kIndexWidth / Math::kPair, kChunk = kIndexStep / Math::kPair;
  constexpr int64_t kTile = Math::kKeyVecs * Math::kLanes;
  const int64_t steps = job.width / Math::kPair;
  alignas(64) uint32_t keys[kMaxSteps * kIndexKeys];  // [step][key]
  alignas(64) uint32_t query[Math::kQueryRows * kMaxSteps];
  for (int64_t j = 0; j < kIndexKeys; ++j) {
    alignas(64) uint32_t units[kChunk] = {};
    const uint8_t* entry = j < job.num_keys ? job.keys[j] : nullptr;
    for (int64_t i = 0; i < job.width; i += kIndexStep) {
      if (entry != nullptr) {
        job.is_fp4 ? Math::decode_fp4(entry + i / 2, entry[job.width / 2 + i / kIndexStep], units)
                   : Math::decode_32(reinterpret_cast<const uint16_t*>(entry) + i, units);
      }
      for (int64_t step = 0; step < kChunk; ++step) keys[(i / Math::kPair + step) * kIndexKeys + j] = units[step];
    }
  }
  for (int64_t t = 0; t < job.num_tokens; ++t) {
    const float* weights = job.weights + t * job.heads;
    for (int64_t first = 0; first < job.counts[t]; first += kTile) {
      Vec scores[Math::kKeyVecs];
      for (Vec& score : scores) score = Math::all(0);
      for (int64_t h = 0; h < job.heads;) {
        const int rows = job.heads - h >= Math::kQueryRows ? Math::kQueryRows : 1;
        for (int r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < job.width; i += kIndexStep) {
            Math::decode_32(job.queries + ((t * job.heads + h + r) * job.width + i),
                            query + r * steps + i / Math::kPair);
          }
        }
        if (rows == 1) {
          add_heads<Math, 1>(keys + first, query, steps, weights + h, scores);
        } else {
          add_heads<Math, Math::kQueryRows>(keys + first, query, steps, weights + h, scores);
        }
        h += rows;
      }
      alignas(64) float all[kTile];
      for (int v = 0; v < Math::kKeyVecs; ++v) Math::store(all + v * Math::kLanes, scores[v]);
      const int64_t left = job.counts[t] - first, count = left < kTile ? left : kTile;
      __builtin_memcpy(job.scores + t * job.stride + first, all, static_cast<unsigned long>(count) * 4);
    }
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
