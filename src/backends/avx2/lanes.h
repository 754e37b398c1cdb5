// SPDX-License-Identifier: Apache-2.0
#pragma once
// 8 lanes of FP32. Included by kernel files of this folder only: all names are local to the file.
#include <immintrin.h>

#include <cstdint>

namespace tessera::backends::avx2 {

namespace {

struct Lanes {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static Vec all(float value) { return _mm256_set1_ps(value); }
  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  // Where either is NaN: b.
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  // value * 2^n for integral n <= 128; 0 for n < -126, where 2^n is subnormal.
  static Vec times_power(Vec value, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 is_kept = _mm256_cmp_ps(n, _mm256_set1_ps(-126), _CMP_NLT_UQ);  // NaN is kept
    return _mm256_and_ps(_mm256_mul_ps(value, _mm256_castsi256_ps(exponent)), is_kept);
  }

  // Nearest even; NaN stays NaN (numeric/bf16.h). In the lower halves.
  static __m256i bf16_bits(Vec value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  }
  static Vec bf16_rounded(Vec value) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(value), 16)); }
  static Vec load_bf16(const uint16_t* from) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  static void store_bf16(uint16_t* to, Vec value) {
    const __m256i bits = bf16_bits(value);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
  static Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static Vec with_sign_of(Vec magnitude, Vec a) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(a, _mm256_set1_ps(-0.0f)));
  }
  // `yes` where a < b.
  static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  // Lane i of the result is lane i ^ kStep.
  template <int kStep>
  static Vec exchange(Vec a) {
    if constexpr (kStep == 1) return _mm256_permute_ps(a, 0xB1);
    if constexpr (kStep == 2) return _mm256_permute_ps(a, 0x4E);
    if constexpr (kStep == 4) return _mm256_permute2f128_ps(a, a, 0x01);
  }
  // 2^(e + kMore) * 1.5 for the exponent e of each lane, at least 2^least_exponent.
  template <int kMore>
  static Vec one_and_a_half_above(Vec a, int least_exponent) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7F800000));
    const __m256i kept = _mm256_max_epi32(exponent, _mm256_set1_epi32((127 + least_exponent) << 23));
    return _mm256_castsi256_ps(_mm256_add_epi32(kept, _mm256_set1_epi32((kMore << 23) + 0x400000)));
  }
  // The inverse of e4m3_over_256, for values that E4M3 has.
  static void store_e4m3(uint8_t* codes, Vec over_256) {
    const __m128i half = _mm256_cvtps_ph(over_256, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i sign = _mm_and_si128(_mm_srli_epi16(half, 8), _mm_set1_epi16(0x80));
    const __m128i magnitude = _mm_and_si128(_mm_srli_epi16(half, 7), _mm_set1_epi16(0x7F));
    const __m128i words = _mm_or_si128(sign, magnitude);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
  }
  // E4M3 codes / 256: shifted into FP16 that is their value, subnormals included. NaN codes come with a NaN scale.
  static Vec e4m3_over_256(const uint8_t* codes) {
    const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x80)), 8);
    const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x7F)), 7);
    return _mm256_cvtph_ps(_mm_or_si128(sign, magnitude));
  }
};

}  // namespace

}  // namespace tessera::backends::avx2
