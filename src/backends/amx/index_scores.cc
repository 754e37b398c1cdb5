// SPDX-License-Identifier: Apache-2.0
// Index scores on tiles: C[head][key] = queries[head][32 values] keys[16 pairs of values][key], then the weighted sum
// over heads, ascending, with keys across lanes. A block of keys is decoded and transposed once for all tokens; queries
// are A as they lie. Order of a product: the tile instruction's (linear.cc), values ascending, 32 at a time.
#include "backends/amx/kernels.h"
#include "backends/amx/tiles.h"
#include "backends/cpu_common/avx512_operands.h"

namespace tessera::backends::amx {

namespace {

using cpu_common::IndexJob;
using cpu_common::kIndexKeys;
using cpu_common::kIndexStep;
using cpu_common::kIndexWidth;
using Math = cpu_common::Bf16Pairs;

// [step][key]; keys behind the last are zeros.
void decode_keys(const IndexJob& job, uint32_t* keys) {
  alignas(64) uint32_t rows[kTileRows * kUnits];
  for (int64_t i = 0; i < job.width; i += kIndexStep) {
    for (int64_t first = 0; first < kIndexKeys; first += kTileRows) {
      for (int64_t j = 0; j < kTileRows; ++j) {
        uint32_t* to = rows + j * kUnits;
        if (first + j >= job.num_keys) {
          __builtin_memset(to, 0, kUnits * 4);
          continue;
        }
        const uint8_t* entry = job.keys[first + j];
        job.is_fp4 ? Math::decode_fp4(entry + i / 2, entry[job.width / 2 + i / kIndexStep], to)
                   : Math::decode_32(reinterpret_cast<const uint16_t*>(entry) + i, to);
      }
      transpose_units(rows, kUnits, keys + i / 2 * kIndexKeys + first, kIndexKeys);
    }
  }
}

// scores[64 keys] += weights times what is above zero, for `heads` (at most 32) heads whose first row is `queries`.
void add_heads(const uint16_t* queries, int64_t width, const uint32_t* keys, const float* weights, int64_t heads,
               __m512 (&scores)[kIndexKeys / kUnits]) {
  alignas(64) float sums[2 * kTileRows][2 * kUnits];
  constexpr int64_t kStride = 2 * kUnits * 4;
  for (int64_t first = 0; first < kIndexKeys / kUnits; first += 2) {
    zero_sums();
    for (int64_t i = 0; i < width; i += kIndexStep) {
      const uint32_t* b = keys + i / 2 * kIndexKeys + first * kUnits;
      _tile_loadd(4, queries + i, width * 2);
      _tile_loadd(5, queries + kTileRows * width + i, width * 2);
      _tile_loadd(6, b, kIndexKeys * 4);
      _tile_loadd(7, b + kUnits, kIndexKeys * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], kStride);
    _tile_stored(1, sums[0] + kUnits, kStride);
    _tile_stored(2, sums[kTileRows], kStride);
    _tile_stored(3, sums[kTileRows] + kUnits, kStride);
    fence();
    for (int64_t h = 0; h < heads; ++h) {
      for (int v = 0; v < 2; ++v) {
        const __m512 positive = Math::max(Math::all(0), Math::load(sums[h] + v * kUnits));  // a NaN passes through
        scores[first + v] = Math::add(scores[first + v], Math::mul(Math::all(weights[h]), positive));
      }
    }
  }
}

}  // namespace

void index_scores(const IndexJob& job) {
  alignas(64) uint32_t keys[kIndexWidth / 2 * kIndexKeys];
  alignas(64) uint16_t last[2 * kTileRows * kIndexWidth] = {};  // of heads that do not fill the tiles
  decode_keys(job, keys);
  const WholeTiles session;
  for (int64_t t = 0; t < job.num_tokens; ++t) {
    if (job.counts[t] <= 0) continue;
    __m512 scores[kIndexKeys / kUnits];
    for (__m512& score : scores) score = Math::all(0);
    for (int64_t h = 0; h < job.heads; h += 2 * kTileRows) {
      const uint16_t* queries = job.queries + (t * job.heads + h) * job.width;
      const int64_t heads = job.heads - h < 2 * kTileRows ? job.heads - h : 2 * kTileRows;
      if (heads < 2 * kTileRows) {
        __builtin_memcpy(last, queries, static_cast<unsigned long>(heads * job.width) * 2);
        queries = last;
      }
      fence();
      add_heads(queries, job.width, keys, job.weights + t * job.heads + h, heads, scores);
    }
    alignas(64) float all[kIndexKeys];
    for (int64_t v = 0; v < kIndexKeys / kUnits; ++v) Math::store(all + v * kUnits, scores[v]);
    __builtin_memcpy(job.scores + t * job.stride, all, static_cast<unsigned long>(job.counts[t]) * 4);
  }
}

}  // namespace tessera::backends::amx
