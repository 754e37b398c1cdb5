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
// I (instruction set): Sum: 16 FP32; Pairs: 16 rows x 2 inputs; Input: two inputs in every lane, kInputBytes each in x;
//   zero, load, store, load_pairs, store_pairs, input(x), dot(sum, pairs, input) which adds both products;
//   kInline: most rows of x for which weights are decoded in registers; kTile rows and kPanels panels go together.
// F (format): I, kGroup, kBlockBytes; pair(block, i): inputs 2i and 2i + 1 of a block; prefetch(block);
//   add<T>(total, part, panel, group).
#include "backends/cpu_common/panel.h"
#include "base/integer_math.h"

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

// R panels from `first_panel`; the last one stands in for missing ones (its sums are then stored twice).
template <int R>
inline void point_panels(const PanelJob& job, int64_t first_panel, int64_t* panels) {
  for (int r = 0; r < R; ++r) panels[r] = least(first_panel + r, job.num_panels - 1);
}

// Decodes as it goes: each weight is used for T rows at once, each input for R panels.
template <class F, int R, int T>
void sum_inline(const PanelJob& job, int64_t first_panel) {
  using I = typename F::I;
  const char* x[T];
  int64_t panels[R];
  point_rows<T>(job, 0, x);
  point_panels<R>(job, first_panel, panels);
  const uint8_t* block[R];
  typename I::Sum total[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    block[r] = job.panels[panels[r]].data;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[r][t] = I::zero();
  }
  for (int64_t begin = 0, group = 0; begin < job.cols; begin += F::kGroup, ++group) {
    typename I::Sum part[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) part[r][t] = I::zero();
    }
    const int64_t end = F::kGroup == kPanelBlock ? begin + kPanelBlock : least(begin + F::kGroup, job.cols);
    for (int64_t k = begin; k < end; k += kPanelBlock) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) F::prefetch(block[r]);
#pragma GCC unroll 8
      for (int i = 0; i < kPairsOfBlock; ++i) {
        typename I::Pairs w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = F::pair(block[r], i);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const typename I::Input pair = I::input(x[t] + (k + 2 * i) * I::kInputBytes);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) part[r][t] = I::dot(part[r][t], w[r], pair);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) block[r] += job.panels[panels[r]].stride * F::kBlockBytes;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) F::template add<T>(total[r], part[r], job.panels[panels[r]], group);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) I::store(job.sums + (panels[r] * kSumRows + t) * kPanelRows, total[r][t]);
  }
}

// T rows against a decoded chunk of R panels, which are kChunkBytes apart.
template <class F, int R, int T>
void sum_tile(const PanelJob& job, const uint8_t* decoded, int64_t chunk_bytes, int64_t k_begin, int64_t k_end,
              int64_t first_panel, int64_t first_row) {
  using I = typename F::I;
  const char* x[T];
  int64_t panels[R];
  point_rows<T>(job, first_row, x);
  point_panels<R>(job, first_panel, panels);
  typename I::Sum total[R][T];
  const uint8_t* w_at[R];
  float* sums[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    w_at[r] = decoded + panels[r] * chunk_bytes;
    sums[r] = job.sums + (panels[r] * kSumRows + first_row) * kPanelRows;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[r][t] = k_begin == 0 ? I::zero() : I::load(sums[r] + t * kPanelRows);
  }
  for (int64_t begin = k_begin; begin < k_end; begin += F::kGroup) {
    typename I::Sum part[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) part[r][t] = I::zero();
    }
    const int64_t end = F::kGroup == kPanelBlock ? begin + kPanelBlock : least(begin + F::kGroup, k_end);
    for (int64_t k = begin; k < end; k += kPanelBlock) {
#pragma GCC unroll 8
      for (int i = 0; i < kPairsOfBlock; ++i) {
        typename I::Pairs w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = I::load_pairs(w_at[r] + i * I::kPairBytes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const typename I::Input pair = I::input(x[t] + (k + 2 * i) * I::kInputBytes);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) part[r][t] = I::dot(part[r][t], w[r], pair);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w_at[r] += kPairsOfBlock * I::kPairBytes;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) F::template add<T>(total[r], part[r], job.panels[panels[r]], begin / F::kGroup);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) I::store(sums[r] + t * kPanelRows, total[r][t]);
  }
}

// Decodes a chunk of every panel, then runs all rows over it.
template <class F>
void sum_by_tiles(const PanelJob& job) {
  using I = typename F::I;
  constexpr int kRows = I::kTile;
  constexpr int64_t kChunkBytes = kChunk / 2 * I::kPairBytes;
  alignas(64) uint8_t decoded[kJobPanels * kChunkBytes];
  // Tiles of about equal height, in steps of those that exist (only the last may reach over the end): 8 rows are 4 and
  // 4, not 6 and 2.
  constexpr int64_t kStep = kRows / 3;
  const int64_t num_tiles = ceil_div<int64_t>(job.num_rows, kRows);
  const int64_t each = round_up<int64_t>(ceil_div(job.num_rows, num_tiles), kStep);
  for (int64_t begin = 0; begin < job.cols; begin += kChunk) {
    const int64_t end = least(begin + kChunk, job.cols);
    for (int64_t p = 0; p < job.num_panels; ++p) {
      const int64_t step = job.panels[p].stride * F::kBlockBytes;
      const uint8_t* block = job.panels[p].data + begin / kPanelBlock * step;
      uint8_t* out = decoded + p * kChunkBytes;
      for (int64_t k = begin; k < end; k += kPanelBlock, block += step) {
        F::prefetch(block);
#pragma GCC unroll 8
        for (int i = 0; i < kPairsOfBlock; ++i, out += I::kPairBytes) I::store_pairs(out, F::pair(block, i));
      }
    }
    for (int64_t row = 0; row < job.num_rows; row += each) {
      const int64_t left = least(each, job.num_rows - row);
      for (int64_t p = 0; p < job.num_panels; p += I::kPanels) {
        if (left > kRows / 3 * 2) {
          sum_tile<F, I::kPanels, kRows>(job, decoded, kChunkBytes, begin, end, p, row);
        } else if (left > kRows / 3) {
          sum_tile<F, I::kPanels, kRows / 3 * 2>(job, decoded, kChunkBytes, begin, end, p, row);
        } else {
          sum_tile<F, I::kPanels, kRows / 3>(job, decoded, kChunkBytes, begin, end, p, row);
        }
      }
    }
  }
}

template <class F>
void panel_sums(const PanelJob& job) {
  using I = typename F::I;
  if (job.num_rows > I::kInline) return sum_by_tiles<F>(job);
  if (job.num_rows == 1) {
    for (int64_t p = 0; p < job.num_panels; p += I::kPanels) sum_inline<F, I::kPanels, 1>(job, p);
  } else if (job.num_rows == 2) {
    for (int64_t p = 0; p < job.num_panels; p += I::kPanels) sum_inline<F, I::kPanels, 2>(job, p);
  } else if (I::kInline > 2) {
    for (int64_t p = 0; p < job.num_panels; p += I::kPanels) sum_inline<F, I::kPanels, I::kInline>(job, p);
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
