// SPDX-License-Identifier: Apache-2.0
// Attention's two products on tiles (docs/kernels/attention_cpu.md).
//   logits[key][head] += keys[key][32 values] q[16 pairs of values][head]: A and B as they lie
//   output[head][value] += probabilities[head][32 keys] values[16 pairs of keys][value]: probabilities are transposed
// Order of a sum: the tile instruction's (linear.cc), values or keys ascending, 32 at a time; keys behind a part's last
// are zeros up to a multiple of 32.
#include "backends/cpu_common/attention_kernel.h"

#include "backends/amx/kernels.h"
#include "backends/amx/tiles.h"
#include "backends/cpu_common/avx512_operands.h"

namespace tessera::backends::amx {

namespace {

using cpu_common::kAttentionChunk;
using cpu_common::kAttentionKeys;

constexpr int64_t kSteps = kAttentionChunk / 2, kPairs = kAttentionKeys / 2;  // units of a key's chunk, of a part

// One step of up to 2 x 2 sums.
template <bool kTwoA, bool kTwoB>
inline void multiply(const uint32_t* a, int64_t next_a, int64_t a_stride, const uint32_t* b, int64_t b_stride) {
  _tile_loadd(4, a, a_stride * 4);
  _tile_loadd(6, b, b_stride * 4);
  _tile_dpbf16ps(0, 4, 6);
  if (kTwoB) {
    _tile_loadd(7, b + kUnits, b_stride * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (!kTwoA) return;
  _tile_loadd(5, a + next_a, a_stride * 4);
  _tile_dpbf16ps(2, 5, 6);
  if (kTwoB) _tile_dpbf16ps(3, 5, 7);
}

// Two tiles of keys against one or two of heads.
template <bool kTwoHeads>
void logits_of(const uint32_t* q, int64_t heads, int64_t chunks, const uint32_t* keys, float* logits) {
  zero_sums();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t step = 0; step < kSteps; step += kUnits) {
      multiply<true, kTwoHeads>(keys + chunk * kAttentionKeys * kSteps + step, kTileRows * kSteps, kSteps,
                                q + (chunk * kSteps + step) * heads, heads);
    }
  }
  _tile_stored(0, logits, heads * 4);
  if (kTwoHeads) _tile_stored(1, logits + kUnits, heads * 4);
  _tile_stored(2, logits + kTileRows * heads, heads * 4);
  if (kTwoHeads) _tile_stored(3, logits + kTileRows * heads + kUnits, heads * 4);
}

// Rows [head][value] of two tiles of values; put(head, value, sums).
template <bool kTwoHeads, class Put>
void output_of(const uint32_t* rows, const uint32_t* values, int64_t steps, int64_t head, int64_t value,
               const Put& put) {
  zero_sums();
  fence();
  for (int64_t step = 0; step < steps; step += kUnits) {
    multiply<kTwoHeads, true>(rows + head * kPairs + step, kTileRows * kPairs, kPairs, values + step * kAttentionChunk,
                              kAttentionChunk);
  }
  alignas(64) float sums[2 * kTileRows][2 * kUnits];
  constexpr int64_t kStride = 2 * kUnits * 4;
  _tile_stored(0, sums[0], kStride);
  _tile_stored(1, sums[0] + kUnits, kStride);
  if (kTwoHeads) _tile_stored(2, sums[kTileRows], kStride);
  if (kTwoHeads) _tile_stored(3, sums[kTileRows] + kUnits, kStride);
  fence();
  for (int64_t r = 0; r < (kTwoHeads ? 2 : 1) * kTileRows; ++r) {
    put(head + r, value, _mm512_load_ps(sums[r]));
    put(head + r, value + kUnits, _mm512_load_ps(sums[r] + kUnits));
  }
}

struct Tiles : cpu_common::Bf16Pairs {
  using Session = WholeTiles;
  static constexpr bool kHasTiles = true;

  // 32 codes at a time, shifted into FP16 (e4m3_over_256).
  static void decode_fp8(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const __m512 factor = cpu_common::scale_of(scale);
    const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000)), magnitude = _mm512_set1_epi16(0x3F80);
    for (int i = 0; i < 2; ++i) {
      const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i)));
      const __m512i halves = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(words, 7), magnitude),
                                             _mm512_and_si512(_mm512_slli_epi16(words, 8), sign));
      const __m512 low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor);
      const __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor);
      const __m512i bits = _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16))),
          _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16)), 1);
      _mm512_storeu_si512(to + 16 * i, bits);
    }
  }

  // logits[key][head] of `count` keys; rows up to a multiple of 32 keys are written.
  static void logits(const uint32_t* q, int64_t heads, int64_t chunks, const uint32_t* keys, int64_t count,
                     float* logits) {
    fence();
    for (int64_t n = 0; n < count; n += 2 * kTileRows) {
      const uint32_t* rows = keys + n * kSteps;
      int64_t h = 0;
      for (; h + 2 * kUnits <= heads; h += 2 * kUnits)
        logits_of<true>(q + h, heads, chunks, rows, logits + n * heads + h);
      if (h < heads) logits_of<false>(q + h, heads, chunks, rows, logits + n * heads + h);
    }
    fence();
  }

  // logits[key][head] of 16 keys by tiles of heads x keys, so that q is A as it lies; keys are transposed. Products
  // commute: the bits of `logits`.
  static void logits_of_step(const uint16_t* q, int64_t num_heads, int64_t width, const uint32_t* keys, float* logits) {
    constexpr int64_t kTiles = cpu_common::kAttentionHeads / kTileRows;
    alignas(64) uint32_t b[cpu_common::kAttentionWidth / 2 * kUnits];
    alignas(64) uint16_t last[kTileRows * cpu_common::kAttentionWidth] = {};  // heads that do not fill a tile
    alignas(64) float sums[kTileRows * kUnits];
    const int64_t heads = (num_heads + kTileRows - 1) / kTileRows * kTileRows, tiles = heads / kTileRows;
    // In the order of addresses, which tile loads are not.
    for (int64_t i = 0; i < num_heads * width; i += kTileInputs) _mm_prefetch(q + i, _MM_HINT_T1);
    for (int64_t i = 0; i < width / 2; i += kUnits) {
      transpose_units(keys + i / kSteps * kAttentionKeys * kSteps + i % kSteps, kSteps, b + i * kUnits, kUnits);
    }
    const uint16_t* a[kTiles] = {};
    for (int64_t i = 0; i < tiles; ++i) a[i] = q + i * kTileRows * width;
    if (heads > num_heads) {
      const unsigned long rows = static_cast<unsigned long>(num_heads % kTileRows);
      __builtin_memcpy(last, a[tiles - 1], rows * static_cast<unsigned long>(width) * 2);
      a[tiles - 1] = last;
    }
    fence();
    zero_sums();
    for (int64_t i = 0; i < width; i += kTileInputs) {
      _tile_loadd(6, b + i / 2 * kUnits, kUnits * 4);
      _tile_loadd(4, a[0] + i, width * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (tiles > 1) {
        _tile_loadd(5, a[1] + i, width * 2);
        _tile_dpbf16ps(1, 5, 6);
      }
      if (tiles > 2) {
        _tile_loadd(4, a[2] + i, width * 2);
        _tile_dpbf16ps(2, 4, 6);
      }
      if (tiles > 3) {
        _tile_loadd(5, a[3] + i, width * 2);
        _tile_dpbf16ps(3, 5, 6);
      }
    }
    for (int64_t i = 0; i < tiles; ++i) {
      if (i == 0) _tile_stored(0, sums, kUnits * 4);
      if (i == 1) _tile_stored(1, sums, kUnits * 4);
      if (i == 2) _tile_stored(2, sums, kUnits * 4);
      if (i == 3) _tile_stored(3, sums, kUnits * 4);
      fence();
      transpose_units(reinterpret_cast<const uint32_t*>(sums), kUnits,
                      reinterpret_cast<uint32_t*>(logits + i * kTileRows), heads);
      fence();
    }
  }

  // probabilities [pair of keys][head] of heads [begin, end) to rows [head][pair of keys], with zeros up to a multiple
  // of 16 pairs.
  static void rows_of_probabilities(uint32_t* probabilities, int64_t heads, int64_t begin, int64_t end, int64_t count,
                                    uint32_t* rows) {
    const int64_t pairs = (count + 1) / 2, steps = steps_of(count);
    for (int64_t h = begin; h < end; h += kTileRows) {
      for (int64_t pair = pairs; pair < steps; ++pair) {
        _mm512_storeu_si512(probabilities + pair * heads + h, _mm512_setzero_si512());
      }
      for (int64_t step = 0; step < steps; step += kUnits)
        transpose_units(probabilities + step * heads + h, heads, rows + h * kPairs + step, kPairs);
    }
  }
  static int64_t steps_of(int64_t count) { return ((count + 1) / 2 + kUnits - 1) / kUnits * kUnits; }

  // put(head, value, sums of 16 values) for all heads and values [begin, end); values [chunk][pair of keys][64].
  template <class Put>
  static void output(const uint32_t* rows, int64_t heads, const uint32_t* values, int64_t count, int64_t begin,
                     int64_t end, const Put& put) {
    for (int64_t value = begin; value < end; value += 2 * kUnits) {
      const uint32_t* from = values + value / kAttentionChunk * kPairs * kAttentionChunk + value % kAttentionChunk;
      int64_t h = 0;
      for (; h + 2 * kTileRows <= heads; h += 2 * kTileRows)
        output_of<true>(rows, from, steps_of(count), h, value, put);
      if (h < heads) output_of<false>(rows, from, steps_of(count), h, value, put);
    }
  }
};

}  // namespace

constinit const cpu_common::AttentionKernels attention = cpu_common::attention_kernels<Tiles>();

}  // namespace tessera::backends::amx
