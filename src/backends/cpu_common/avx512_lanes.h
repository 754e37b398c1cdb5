// SPDX-License-Identifier: Apache-2.0
#pragma once
// 16 lanes of FP32. Included by kernel files with AVX-512 only: all names are local to the
// file.
#include <immintrin.h>

#include <cstdint>

namespace tessera::backends::cpu_common {

namespace {

struct Lanes {
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static Vec all(float value) { return _mm512_set1_ps(value); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  // Where either is NaN: b.
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  // value * 2^n, n integral.
  static Vec times_power(Vec value, Vec n) { return _mm512_scalef_ps(value, n); }

  // Nearest even; NaN stays NaN (numeric/bf16.h). In the lower halves.
  static __m512i bf16_bits(Vec value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_srli_epi32(kept, 16);
  }
  static Vec bf16_rounded(Vec value) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(value), 16)); }
  static Vec load_bf16(const uint16_t* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  static void store_bf16(uint16_t* to, Vec value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bf16_bits(value)));
  }
  static Vec abs(Vec a) { return _mm512_abs_ps(a); }
  static Vec with_sign_of(Vec magnitude, Vec a) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(a, _mm512_set1_ps(-0.0f)));
  }
  // `yes` where a < b.
  static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  // Lane i of the result is lane i ^ kStep.
  template <int kStep>
  static Vec exchange(Vec a) {
    if constexpr (kStep == 1) return _mm512_permute_ps(a, 0xB1);
    if constexpr (kStep == 2) return _mm512_permute_ps(a, 0x4E);
    if constexpr (kStep == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
    if constexpr (kStep == 8) return _mm512_shuffle_f32x4(a, a, 0x4E);
  }
  // 2^(e + kMore) * 1.5 for the exponent e of each lane, at least 2^least_exponent.
  template <int kMore>
  static Vec one_and_a_half_above(Vec a, int least_exponent) {
    const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7F800000));
    const __m512i kept = _mm512_max_epi32(exponent, _mm512_set1_epi32((127 + least_exponent) << 23));
    return _mm512_castsi512_ps(_mm512_add_epi32(kept, _mm512_set1_epi32((kMore << 23) + 0x400000)));
  }
  // The inverse of e4m3_over_256, for values that E4M3 has.
  static void store_e4m3(uint8_t* codes, Vec over_256) {
    const __m256i half = _mm512_cvtps_ph(over_256, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
    const __m256i magnitude = _mm256_and_si256(_mm256_srli_epi16(half, 7), _mm256_set1_epi16(0x7F));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_cvtepi16_epi8(_mm256_or_si256(sign, magnitude)));
  }
  // E4M3 codes / 256: shifted into FP16 that is their value, subnormals included. NaN codes come with a NaN scale.
  static Vec e4m3_over_256(const uint8_t* codes) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
    const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, magnitude));
  }
};

}  // namespace

}  // namespace tessera::backends::cpu_common
