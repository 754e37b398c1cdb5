// SPDX-License-Identifier: Apache-2.0
#pragma once
// Panel sums of a few rows of x by vectors, in the tile instruction's order: for a few rows a tile's products cost as
// much as for 16, and decoded weights go through memory. Included by linear.cc only.
//
// What bounds it: decoding. NVFP4, per block of 16 x 16: 2 loads, 6 shifts, 8 permutations, 16 instructions that split
// pairs, 16 products with scales, 3 for the scales, and per row of x 16 multiply-adds and one addition: 66 at one row,
// 100 at three. Order: as the tile instruction (Intel SDM, TDPBF16PS): per 32 inputs a chain of even and one of odd
// inputs, each from +0, K ascending; their sum is added to C. It takes denormal inputs as zeros of their sign and
// flushes denormal results, whatever MXCSR says; here MXCSR says so. Multiplying by FP8 scales is outside of that, as
// it is for tiles.
#include "backends/amx/formats.h"

namespace tessera::backends::amx {

namespace {

constexpr int64_t kMostFewRows = 3;
// Values of x that are in the first-level cache as FP32, over all rows.
constexpr int64_t kFewValues = 4096;

// Denormals as the tile instruction has them, until the end of the scope. What computes so is a function that the
// compiler must not inline: it does not see that arithmetic depends on MXCSR.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZeros); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZeros = 0x0040;
  unsigned before_;
};

// Inputs [begin, end) of T rows as FP32, [(end - begin) / 16][T][16].
template <int T>
void widen_rows(const PanelJob& job, int64_t begin, int64_t end, float* x) {
  const XRows rows = x_rows(job, 0, T);
  for (int64_t k = begin; k < end; k += kPanelBlock) {
    const char* at = rows.data + k / kTileInputs * rows.step + k % kTileInputs * 2;
    for (int t = 0; t < T; ++t, x += kPanelBlock) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + t * rows.stride));
      _mm512_store_si512(x, _mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
    }
  }
}

// C += x . w over inputs [begin, end) of two panels; `c` is each panel's [T][16]. With group scales: C of each group of
// 128 inputs, from zero, one after another.
template <class F, int T>
__attribute__((noinline)) void few_products(const Panel& panel0, const Panel& panel1, int64_t begin, int64_t end,
                                            const float* x, float* c0, float* c1) {
  const Panel* const panels[2] = {&panel0, &panel1};
  float* c[2] = {c0, c1};
  const uint8_t* block[2];
  __m512 sum[2][T];
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    block[p] = panels[p]->data + begin / kPanelBlock * panels[p]->stride * F::kBlockBytes;
#pragma GCC unroll 3
    for (int t = 0; t < T; ++t) {
      sum[p][t] = F::kHasGroupScales || begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(c[p] + t * kPanelRows);
    }
  }
  for (int64_t k = begin; k < end;) {
    __m512 even[2][T], odd[2][T];
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 3
      for (int t = 0; t < T; ++t) even[p][t] = odd[p][t] = _mm512_setzero_ps();
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, k += kPanelBlock, x += T * kPanelBlock) {
      typename F::Scales scales[2];
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        F::prefetch(*panels[p], k / kPanelBlock, block[p]);
        scales[p] = F::scales(*panels[p], k / kPanelBlock);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kPairsOfBlock; ++i) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          const InputPair w = F::inputs(block[p], i, scales[p]);
#pragma GCC unroll 3
          for (int t = 0; t < T; ++t) {
            even[p][t] = _mm512_fmadd_ps(w.even, _mm512_set1_ps(x[t * kPanelBlock + 2 * i]), even[p][t]);
            odd[p][t] = _mm512_fmadd_ps(w.odd, _mm512_set1_ps(x[t * kPanelBlock + 2 * i + 1]), odd[p][t]);
          }
        }
      }
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) block[p] += panels[p]->stride * F::kBlockBytes;
    }
    const bool ends_group = F::kHasGroupScales && (k % kGroup == 0 || k == end);
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 3
      for (int t = 0; t < T; ++t) {
        sum[p][t] = _mm512_add_ps(sum[p][t], _mm512_add_ps(even[p][t], odd[p][t]));
        if (!ends_group) continue;
        _mm512_store_ps(c[p] + t * kPanelRows, sum[p][t]);
        sum[p][t] = _mm512_setzero_ps();
      }
      if (ends_group) c[p] += T * kPanelRows;
    }
  }
  if (F::kHasGroupScales) return;
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 3
    for (int t = 0; t < T; ++t) _mm512_store_ps(c[p] + t * kPanelRows, sum[p][t]);
  }
}

// Inputs [begin, end) of two panels (perhaps one and the same), added to the job's sums.
template <class F, int T>
void add_few(const PanelJob& job, const int64_t* panels, int64_t begin, int64_t end, const float* x) {
  const Panel &panel0 = job.panels[panels[0]], &panel1 = job.panels[panels[1]];
  float* const sums[2] = {job.sums + panels[0] * kSumRows * kPanelRows, job.sums + panels[1] * kSumRows * kPanelRows};
  if (!F::kHasGroupScales) {
    const FlushDenormals flush;
    return few_products<F, T>(panel0, panel1, begin, end, x, sums[0], sums[1]);
  }
  alignas(64) float parts[2][kFewValues / kGroup * kPanelRows];
  {
    const FlushDenormals flush;
    few_products<F, T>(panel0, panel1, begin, end, x, parts[0], parts[1]);
  }
  for (int p = 0; p < (panels[0] == panels[1] ? 1 : 2); ++p) {
    const float* part = parts[p];
    for (int64_t k = begin; k < end; k += kGroup, part += T * kPanelRows) {
      add_scaled(part, group_scale(job.panels[panels[p]], k), T, k == 0, sums[p]);
    }
  }
}

template <class F, int T>
void sum_few(const PanelJob& job) {
  constexpr int64_t kInputs = kFewValues / T / kGroup * kGroup;
  alignas(64) float x[kFewValues];
  for (int64_t begin = 0; begin < job.cols; begin += kInputs) {
    const int64_t end = begin + kInputs < job.cols ? begin + kInputs : job.cols;
    widen_rows<T>(job, begin, end, x);
    for (int64_t p = 0; p < job.num_panels; p += 2) {
      const int64_t panels[2] = {p, p + 1 < job.num_panels ? p + 1 : p};
      add_few<F, T>(job, panels, begin, end, x);
    }
  }
}

// 1 to kMostFewRows rows.
template <class F>
void sum_few_rows(const PanelJob& job) {
  if (job.num_rows == 1) return sum_few<F, 1>(job);
  if (job.num_rows == 2) return sum_few<F, 2>(job);
  return sum_few<F, 3>(job);
}

}  // namespace

}  // namespace tessera::backends::amx
