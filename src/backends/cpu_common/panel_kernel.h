// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sums of a panel for any vector instruction set and weight format. Included by kernel files only: all names are
// local to the file, so that each copy keeps its own instructions.
//
// What bounds it: at one token the packed bytes, read once; from about eight tokens on the products.
// Order of a sum: groups of F::kGroup inputs ascending; inside a group one chain from zero, two inputs (even, then odd,
// or as the dot-product instruction has it) at a step; then one multiply-add by the group's scale. No tiling changes
// it.
//
// I (instruction set): Sum: 16 FP32; Pairs: 16 rows x 2 inputs; kInputBytes of x; zero, load, store, load_pairs,
//   store_pairs, dot(sum, pairs, x) which adds both products; kInline, kTile: rows of x kept in registers at most.
// F (format): I, kGroup, kBlockBytes; pair(block, i): inputs 2i and 2i + 1 of a block; prefetch(block);
//   add<T>(total, part, scales, group).
#include "backends/cpu_common/panel.h"

namespace tessera::backends::cpu_common {

namespace {

constexpr int64_t kChunk = 128;  // inputs whose decoded weights stay in the first-level cache
constexpr int kPairsOfBlock = kPanelBlock / 2;

inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Pointers to T rows; the last row stands in for missing ones.
template <int T>
inline void point_rows(const PanelJob& job, int64_t first, const char** x) {
  for (int t = 0; t < T; ++t) {
    x[t] = static_cast<const char*>(job.rows) + least(first + t, job.num_rows - 1) * job.row_stride;
  }
}

// Decodes as it goes: each weight is used for T rows at once.
template <class F, int T>
void sum_inline(const PanelJob& job, const Panel& panel, float* sums) {
  using I = typename F::I;
  const char* x[T];
  point_rows<T>(job, 0, x);
  typename I::Sum total[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) total[t] = I::zero();
  const uint8_t* block = panel.data;
  for (int64_t begin = 0, group = 0; begin < job.cols; begin += F::kGroup, ++group) {
    typename I::Sum part[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) part[t] = I::zero();
    const int64_t end = F::kGroup == kPanelBlock ? begin + kPanelBlock : least(begin + F::kGroup, job.cols);
    for (int64_t k = begin; k < end; k += kPanelBlock, block += F::kBlockBytes) {
      F::prefetch(block);
#pragma GCC unroll 8
      for (int i = 0; i < kPairsOfBlock; ++i) {
        const typename I::Pairs w = F::pair(block, i);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) part[t] = I::dot(part[t], w, x[t] + (k + 2 * i) * I::kInputBytes);
      }
    }
    F::template add<T>(total, part, panel.scales, group);
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) I::store(sums + t * kPanelRows, total[t]);
}

// T rows against a decoded chunk.
template <class F, int T>
void sum_tile(const PanelJob& job, const Panel& panel, const uint8_t* decoded, int64_t k_begin, int64_t k_end,
              int64_t first_row, float* sums) {
  using I = typename F::I;
  const char* x[T];
  point_rows<T>(job, first_row, x);
  typename I::Sum total[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) total[t] = k_begin == 0 ? I::zero() : I::load(sums + t * kPanelRows);
  const uint8_t* w_at = decoded;
  for (int64_t begin = k_begin; begin < k_end; begin += F::kGroup) {
    typename I::Sum part[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) part[t] = I::zero();
    const int64_t end = F::kGroup == kPanelBlock ? begin + kPanelBlock : least(begin + F::kGroup, k_end);
    for (int64_t k = begin; k < end; k += kPanelBlock) {
#pragma GCC unroll 8
      for (int i = 0; i < kPairsOfBlock; ++i, w_at += I::kPairBytes) {
        const typename I::Pairs w = I::load_pairs(w_at);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) part[t] = I::dot(part[t], w, x[t] + (k + 2 * i) * I::kInputBytes);
      }
    }
    F::template add<T>(total, part, panel.scales, begin / F::kGroup);
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) I::store(sums + t * kPanelRows, total[t]);
}

// Decodes a chunk of every panel, then runs all rows over it.
template <class F>
void sum_by_tiles(const PanelJob& job) {
  using I = typename F::I;
  constexpr int64_t kChunkBytes = kChunk / 2 * I::kPairBytes;
  alignas(64) uint8_t decoded[kJobPanels * kChunkBytes];
  for (int64_t begin = 0; begin < job.cols; begin += kChunk) {
    const int64_t end = least(begin + kChunk, job.cols);
    for (int64_t p = 0; p < job.num_panels; ++p) {
      const uint8_t* block = job.panels[p].data + begin / kPanelBlock * F::kBlockBytes;
      uint8_t* out = decoded + p * kChunkBytes;
      for (int64_t k = begin; k < end; k += kPanelBlock, block += F::kBlockBytes) {
        F::prefetch(block);
#pragma GCC unroll 8
        for (int i = 0; i < kPairsOfBlock; ++i, out += I::kPairBytes) I::store_pairs(out, F::pair(block, i));
      }
    }
    for (int64_t row = 0; row < job.num_rows;) {
      const int64_t left = job.num_rows - row;
      for (int64_t p = 0; p < job.num_panels; ++p) {
        const uint8_t* w = decoded + p * kChunkBytes;
        float* sums = job.sums + (p * kSumRows + row) * kPanelRows;
        if (left > I::kTile / 3 * 2) {
          sum_tile<F, I::kTile>(job, job.panels[p], w, begin, end, row, sums);
        } else if (left > I::kTile / 3) {
          sum_tile<F, I::kTile / 3 * 2>(job, job.panels[p], w, begin, end, row, sums);
        } else {
          sum_tile<F, I::kTile / 3>(job, job.panels[p], w, begin, end, row, sums);
        }
      }
      row += I::kTile;
    }
  }
}

template <class F>
void panel_sums(const PanelJob& job) {
  using I = typename F::I;
  if (job.num_rows > I::kInline) return sum_by_tiles<F>(job);
  for (int64_t p = 0; p < job.num_panels; ++p) {
    float* sums = job.sums + p * kSumRows * kPanelRows;
    if (job.num_rows == 1) {
      sum_inline<F, 1>(job, job.panels[p], sums);
    } else if (job.num_rows == 2) {
      sum_inline<F, 2>(job, job.panels[p], sums);
    } else if (I::kInline > 2) {
      if (job.num_rows <= 4) {
        sum_inline<F, 4>(job, job.panels[p], sums);
      } else {
        sum_inline<F, I::kInline>(job, job.panels[p], sums);
      }
    }
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
