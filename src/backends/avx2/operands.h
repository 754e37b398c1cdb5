// SPDX-License-Identifier: Apache-2.0
#pragma once
// Operands of products with cached vectors, in FP32. Included by kernel files of this folder only: all names are local
// to the file. What each member means: cpu_common/attention_kernel.h, index_kernel.h.
#include "backends/avx2/lanes.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::avx2 {

namespace {

struct Floats : Lanes {
  using Units = __m256;
  struct Session {};
  static constexpr bool kHasTiles = false;
  static constexpr int kPair = 1, kHeadVecs = 2, kKeys = 6, kDimVecs = 2, kRows = 6, kKeyVecs = 2, kQueryRows = 4;
  static Units load_units(const uint32_t* from) { return load(reinterpret_cast<const float*>(from)); }
  static void store_units(uint32_t* to, Units value) { store(reinterpret_cast<float*>(to), value); }
  static Units all_units(uint32_t value) { return all(__builtin_bit_cast(float, value)); }
  static Vec dot(Vec sum, Units a, Units b) { return _mm256_fmadd_ps(a, b, sum); }
  static Units pack(Vec p, Vec) { return bf16_rounded(p); }
  static void decode_fp8(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const Vec factor = mul(all(cpu_common::power_of_code(scale)), all(256));
    for (int i = 0; i < 8; ++i) store_units(to + 8 * i, mul(e4m3_over_256(codes + 8 * i), factor));
  }
  static void decode_bf16(const uint16_t* from, uint32_t* to) {
    for (int i = 0; i < 8; ++i) store_units(to + 8 * i, load_bf16(from + 8 * i));
  }
  static void decode_32(const uint16_t* from, uint32_t* to) {
    for (int i = 0; i < 4; ++i) store_units(to + 8 * i, load_bf16(from + 8 * i));
  }
  // The even code of a byte is low.
  static void decode_fp4(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const Vec magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), factor = all(cpu_common::power_of_code(scale));
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int i = 0; i < 4; ++i) {
      int eight = 0;
      __builtin_memcpy(&eight, codes + 4 * i, 4);
      const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
      const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
      const Vec value = _mm256_permutevar8x32_ps(magnitudes, code);
      store_units(to + 8 * i, mul(_mm256_or_ps(value, _mm256_castsi256_ps(sign)), factor));
    }
  }
};

}  // namespace

}  // namespace tessera::backends::avx2
