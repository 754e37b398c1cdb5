// SPDX-License-Identifier: Apache-2.0
// Attention by FP32 multiply-adds on 8 lanes.
#include "backends/cpu_common/attention_kernel.h"

#include "backends/avx2/kernels.h"
#include "backends/avx2/lanes.h"
#include "numeric/e8m0.h"

namespace tessera::backends::avx2 {

namespace {

struct Floats : Lanes {
  using Units = __m256;
  static constexpr int kPair = 1, kHeadVecs = 2, kKeys = 6, kDimVecs = 2, kRows = 6;
  static Units load_units(const uint32_t* from) { return load(reinterpret_cast<const float*>(from)); }
  static void store_units(uint32_t* to, Units value) { store(reinterpret_cast<float*>(to), value); }
  static Units all_units(uint32_t value) { return all(__builtin_bit_cast(float, value)); }
  static Vec dot(Vec sum, Units a, Units b) { return _mm256_fmadd_ps(a, b, sum); }
  static Units pack(Vec p, Vec) { return bf16_rounded(p); }
  static void decode_fp8(const uint8_t* codes, uint8_t scale, uint32_t* to) {
    const Vec factor = mul(all(numeric::e8m0_to_float(scale)), all(256));
    for (int i = 0; i < 8; ++i) store_units(to + 8 * i, mul(e4m3_over_256(codes + 8 * i), factor));
  }
  static void decode_bf16(const uint16_t* from, uint32_t* to) {
    for (int i = 0; i < 8; ++i) store_units(to + 8 * i, load_bf16(from + 8 * i));
  }
};

}  // namespace

void attention_fma(const cpu_common::AttentionJob& job) {
  cpu_common::attend<Floats>(job);
}

}  // namespace tessera::backends::avx2
