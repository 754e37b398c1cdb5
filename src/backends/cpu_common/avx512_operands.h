// SPDX-License-Identifier: Apache-2.0
#pragma once
// Operands of products with cached vectors: BF16 pairs, and FP32 where the processor lacks their dot product. Cached
// values are exact in BF16 either way: E4M3 or E2M1 times a power of two. Included by kernel files with AVX-512
// only: all names are local to the file. What each member means: cpu_common/attention_kernel.h, index_kernel.h.
#include "backends/cpu_common/avx512_decode.h"
#include "backends/cpu_common/avx512_lanes.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::cpu_common {

namespace {

inline __m512 scale_of(uint8_t code) {
  return _mm512_mul_ps(_mm512_set1_ps(power_of_code(code)), _mm512_set1_ps(256));
}

// 32 codes, the even one of a byte low, to BF16.
inline __m512i e2m1_words(const uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
  return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(both), _mm512_load_si512(kE2m1.bf16));
}

struct Bf16Pairs : Lanes {
  using Units = __m512i;
  struct Session {};
  static constexpr bool kHasTiles = false;
  static constexpr int kPair = 2, kHeadVecs = 4, kKeys = 6, kDimVecs = 4, kRows = 6, kKeyVecs = 4, kQueryRows = 4;
  static Units load_units(const uint32_t* from) { return _mm512_loadu_si512(from); }
  static void store_units(uint32_t* to, Units value) { _mm512_storeu_si512(to, value); }
  static Units all_units(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Vec dot(Vec sum, Units a, Units b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Units pack(Vec even, Vec odd) {
    return _mm512_or_si512(bf16_bits(even), _mm512_slli_epi32(bf16_bits(odd), 16));
  }
  // Exact, so the upper halves are all there is.
  static void decode_fp8(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const __m512 factor = scale_of(scale);
    for (int i = 0; i < 4; ++i) {
      const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(e4m3_over_256(codes + 16 * i), factor));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
  }
  static void decode_bf16(const uint16_t* from, uint32_t* to) { __builtin_memcpy(to, from, 128); }
  static void zip(const uint32_t* a, const uint32_t* b, uint32_t* to) {
    for (int i = 0; i < 4; ++i) {
      const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 8 * i)));
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 8 * i)));
      _mm512_storeu_si512(to + 16 * i, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
  }
  static void decode_32(const uint16_t* from, uint32_t* to) { __builtin_memcpy(to, from, 64); }
  static void decode_fp4(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const __m512 factor = _mm512_set1_ps(power_of_code(scale));
    const __m512i words = e2m1_words(codes);
    for (int i = 0; i < 2; ++i) {
      const __m256i half = i == 0 ? _mm512_castsi512_si256(words) : _mm512_extracti64x4_epi64(words, 1);
      const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(value, factor));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
  }
};

struct Floats : Lanes {
  using Units = __m512;
  struct Session {};
  static constexpr bool kHasTiles = false;
  static constexpr int kPair = 1, kHeadVecs = 4, kKeys = 6, kDimVecs = 4, kRows = 6, kKeyVecs = 4, kQueryRows = 4;
  static Units load_units(const uint32_t* from) { return _mm512_loadu_ps(from); }
  static void store_units(uint32_t* to, Units value) { _mm512_storeu_ps(to, value); }
  static Units all_units(uint32_t value) { return _mm512_set1_ps(__builtin_bit_cast(float, value)); }
  static Vec dot(Vec sum, Units a, Units b) { return _mm512_fmadd_ps(a, b, sum); }
  static Units pack(Vec p, Vec) { return bf16_rounded(p); }
  static void decode_fp8(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const __m512 factor = scale_of(scale);
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + 16 * i, _mm512_mul_ps(e4m3_over_256(codes + 16 * i), factor));
  }
  static void decode_bf16(const uint16_t* from, uint32_t* to) {
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + 16 * i, load_bf16(from + 16 * i));
  }
  static void decode_32(const uint16_t* from, uint32_t* to) {
    for (int i = 0; i < 2; ++i) _mm512_storeu_ps(to + 16 * i, load_bf16(from + 16 * i));
  }
  static void decode_fp4(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const __m512 factor = _mm512_set1_ps(power_of_code(scale));
    alignas(64) uint16_t words[32];
    _mm512_store_si512(words, e2m1_words(codes));
    for (int i = 0; i < 2; ++i) _mm512_storeu_ps(to + 16 * i, _mm512_mul_ps(load_bf16(words + 16 * i), factor));
  }
};

}  // namespace

}  // namespace tessera::backends::cpu_common
