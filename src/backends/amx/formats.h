// SPDX-License-Identifier: Apache-2.0
#pragma once
// The weight formats of the tile kernels. Included by kernel files only: all names are local to the file.
//
// F (format): kBlockBytes; kHasGroupScales: sums of 128 inputs are multiplied by an FP32 scale, codes are not;
//   scales(panel, block): what inputs() of a block need besides codes; prefetch(panel, block, data): a block far ahead;
//   inputs(data, i, scales): inputs 2i and 2i + 1 of 16 rows as FP32, exact BF16 values;
//   decode(panel, data, block, out): the same as BF16 pairs, half of a B tile.
#include <immintrin.h>

#include "backends/amx/tiles.h"
#include "backends/cpu_common/avx512_decode.h"

namespace tessera::backends::amx {

namespace {

using cpu_common::kPanelBlock;
using cpu_common::kPanelRows;
using cpu_common::kSumRows;
using cpu_common::Panel;
using cpu_common::PanelJob;

constexpr int64_t kGroup = 128;  // inputs per FP8 scale
constexpr int64_t kPrefetchBytes = 2048;
constexpr int kPairsOfBlock = kPanelBlock / 2;

struct InputPair {
  __m512 even, odd;
};

inline InputPair split_pair(__m512i pair) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), _mm512_castsi512_ps(_mm512_and_si512(pair, upper))};
}

template <int kBytes>
inline void prefetch_block(const uint8_t* data) {
  for (int line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + kPrefetchBytes + line, _MM_HINT_T0);
  }
}

struct Nvfp4 {
  static constexpr int kBlockBytes = 128;
  static constexpr bool kHasGroupScales = false;
  using Scales = __m512;
  static Scales scales(const Panel& panel, int64_t block_idx) {
    return cpu_common::nvfp4_scales(panel.scales, block_idx * panel.stride);
  }
  static void prefetch(const Panel& panel, int64_t block_idx, const uint8_t* block) {
    prefetch_block<kBlockBytes>(block);
    _mm_prefetch(static_cast<const char*>(panel.scales) + block_idx * panel.stride * kPanelRows + kPrefetchBytes / 8,
                 _MM_HINT_T0);
  }
  // Code x scale has at most six significant bits: both products are BF16 values, upper halves of FP32.
  static InputPair inputs(const uint8_t* block, int i, Scales scales) {
    const InputPair codes = split_pair(cpu_common::nvfp4_pair(block, i));
    return {_mm512_mul_ps(codes.even, scales), _mm512_mul_ps(codes.odd, scales)};
  }
  static void decode(const Panel& panel, const uint8_t* block, int64_t block_idx, uint8_t* out) {
    const Scales factors = scales(panel, block_idx);
    // The lower half of each lane takes the upper half of the even product.
    const __m512i upper_to_lower = _mm512_set4_epi32(0x0F0E, 0x0B0A, 0x0706, 0x0302);
    constexpr __mmask64 kLowerHalves = 0x3333333333333333;
#pragma GCC unroll 8
    for (int i = 0; i < kPairsOfBlock; ++i) {
      const InputPair pair = inputs(block, i, factors);
      _mm512_store_si512(out + i * 64, _mm512_mask_shuffle_epi8(_mm512_castps_si512(pair.odd), kLowerHalves,
                                                                _mm512_castps_si512(pair.even), upper_to_lower));
    }
  }
};

struct NoScales {};

struct Fp8 {
  static constexpr int kBlockBytes = 256;
  static constexpr bool kHasGroupScales = true;
  using Scales = NoScales;
  static Scales scales(const Panel&, int64_t) { return {}; }
  static void prefetch(const Panel&, int64_t, const uint8_t* block) { prefetch_block<kBlockBytes>(block); }
  static InputPair inputs(const uint8_t* block, int i, Scales) { return split_pair(cpu_common::fp8_pair(block, i)); }
  static void decode(const Panel&, const uint8_t* block, int64_t, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < kPairsOfBlock; ++i) _mm512_store_si512(out + i * 64, cpu_common::fp8_pair(block, i));
  }
};

struct Bf16 {
  static constexpr int kBlockBytes = 512;
  static constexpr bool kHasGroupScales = false;
  using Scales = NoScales;
  static Scales scales(const Panel&, int64_t) { return {}; }
  static void prefetch(const Panel&, int64_t, const uint8_t* block) { prefetch_block<kBlockBytes>(block); }
  static InputPair inputs(const uint8_t* block, int i, Scales) { return split_pair(cpu_common::bf16_pair(block, i)); }
  static void decode(const Panel&, const uint8_t* block, int64_t, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < kPairsOfBlock; ++i) _mm512_store_si512(out + i * 64, cpu_common::bf16_pair(block, i));
  }
};

// Rows of x of a job from `first`, `count` of them (a block of tiles), by 32 inputs: bytes between rows and between
// steps of inputs.
struct XRows {
  const char* data;
  int64_t stride, step;
};

inline XRows x_rows(const PanelJob& job, int64_t first, int64_t count) {
  const char* data = static_cast<const char*>(job.rows) + first * job.row_stride;
  constexpr int64_t kBytes = kTileInputs * 2;
  return job.is_tiled ? XRows{data, kBytes, count * kBytes} : XRows{data, job.row_stride, kBytes};
}

inline float group_scale(const Panel& panel, int64_t k) {
  return static_cast<const float*>(panel.scales)[k / kGroup];
}

// sums = part * scale + (is_first ? 0 : sums) over `rows` rows of a panel.
inline void add_scaled(const float* part, float scale, int64_t rows, bool is_first, float* sums) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t t = 0; t < rows; ++t, part += kPanelRows, sums += kPanelRows) {
    const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums);
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(part), factor, before));
  }
}

}  // namespace

}  // namespace tessera::backends::amx
