// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weight codes of a panel's block to BF16, exactly, 32 at a time. Included by kernel files with AVX-512 only: all names
// are local to the file.
#include <immintrin.h>

#include <cstdint>

#include "backends/cpu_common/panel.h"
#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"

namespace tessera::backends::cpu_common {

namespace {

// vpermw looks at five bits of an index, a code has four: both halves of the table are equal, so that the bit above a
// code, which belongs to its neighbour, does not matter.
struct alignas(64) E2m1Table {
  uint16_t bf16[32];
};
constexpr E2m1Table kE2m1 = [] {
  E2m1Table table{};
  for (int i = 0; i < 32; ++i)
    table.bf16[i] = numeric::bf16_from_float(numeric::e2m1_to_float(static_cast<uint8_t>(i & 15)));
  return table;
}();

// Upper and lower byte of the BF16 of each positive E4M3 code.
struct alignas(64) E4m3Table {
  uint8_t high[128], low[128];
};
constexpr E4m3Table kE4m3 = [] {
  E4m3Table table{};
  for (int i = 0; i < 128; ++i) {
    const uint16_t bits = numeric::bf16_from_float(numeric::e4m3_to_float(static_cast<uint8_t>(i)));
    table.high[i] = static_cast<uint8_t>(bits >> 8), table.low[i] = static_cast<uint8_t>(bits & 255);
  }
  return table;
}();

// Inputs 2i and 2i + 1 of 16 rows, i in [0, 8), as BF16 pairs.
inline __m512i nvfp4_pair(const uint8_t* block, int i) {
  const __m512i codes = _mm512_loadu_si512(block + i / 4 * 64);
  return _mm512_permutexvar_epi16(i % 4 == 0 ? codes : _mm512_srli_epi16(codes, static_cast<unsigned>(i % 4 * 4)),
                                  _mm512_load_si512(kE2m1.bf16));
}

// A block's 16 scales / 256: an E4M3 code shifted into FP16 is its value / 256, subnormals included.
inline __m512 nvfp4_scales(const void* scales, int64_t group) {
  const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(scales) + group);
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7));
}

inline __m512i fp8_pair(const uint8_t* block, int i) {
  const __m512i codes = _mm512_loadu_si512(block + i / 2 * 64);
  const __m512i high =
      _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.high), codes, _mm512_load_si512(kE4m3.high + 64));
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.low), codes, _mm512_load_si512(kE4m3.low + 64));
  // high | (codes & 0x80): the sign.
  const __m512i signed_high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xF8);
  return i % 2 == 0 ? _mm512_unpacklo_epi8(low, signed_high) : _mm512_unpackhi_epi8(low, signed_high);
}

inline __m512i bf16_pair(const uint8_t* block, int i) {
  return _mm512_loadu_si512(block + i * 64);
}

}  // namespace

}  // namespace tessera::backends::cpu_common
