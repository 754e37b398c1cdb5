// SPDX-License-Identifier: Apache-2.0
// Panel sums by dot products of BF16 pairs (AVX512_BF16): two products and two roundings a lane and instruction. Inputs
// and sums below FP32's normal range count as zero, as the instruction has it.
#include "backends/avx512/kernels.h"
#include "backends/avx512/panel_formats.h"

namespace tessera::backends::avx512 {

namespace {

struct DotProducts {
  using Sum = __m512;
  using Pairs = __m512i;
  using Input = __m512bh;
  static constexpr int kInputBytes = 2, kPairBytes = 64, kInline = 4, kTile = 6, kPanels = 2;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Sum value) { _mm512_store_ps(to, value); }
  static Pairs from_bf16(__m512i pairs) { return pairs; }
  static Pairs load_pairs(const uint8_t* from) { return _mm512_load_si512(from); }
  static void store_pairs(uint8_t* to, Pairs value) { _mm512_store_si512(to, value); }
  static Input input(const char* x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  static Sum dot(Sum sum, Pairs w, Input x) { return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), x); }
};

}  // namespace

void nvfp4_bf16(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Nvfp4<DotProducts>>(job);
}
void fp8_bf16(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Fp8<DotProducts>>(job);
}
void bf16_bf16(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Bf16<DotProducts>>(job);
}

}  // namespace tessera::backends::avx512
