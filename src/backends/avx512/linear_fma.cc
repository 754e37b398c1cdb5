// SPDX-License-Identifier: Apache-2.0
// Panel sums by FP32 multiply-adds, for processors without AVX512_BF16 and for FP32 weights: even input, then odd.
#include "backends/avx512/kernels.h"
#include "backends/avx512/panel_formats.h"
#include "backends/cpu_common/epilogue.h"

namespace tessera::backends::avx512 {

namespace {

struct MultiplyAdds {
  using Sum = __m512;
  struct Pairs {
    __m512 even, odd;
  };
  using Input = Pairs;
  static constexpr int kInputBytes = 4, kPairBytes = 128, kInline = 4, kTile = 6, kPanels = 2;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Sum value) { _mm512_store_ps(to, value); }
  static Pairs from_bf16(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))};
  }
  static Pairs load_pairs(const uint8_t* from) { return {_mm512_load_ps(from), _mm512_load_ps(from + 64)}; }
  static void store_pairs(uint8_t* to, Pairs value) {
    _mm512_store_ps(to, value.even);
    _mm512_store_ps(to + 64, value.odd);
  }
  static Input input(const char* x) {
    float pair[2];
    __builtin_memcpy(pair, x, sizeof pair);
    return {_mm512_set1_ps(pair[0]), _mm512_set1_ps(pair[1])};
  }
  static Sum dot(Sum sum, Pairs w, Input x) {
    return _mm512_fmadd_ps(w.odd, x.odd, _mm512_fmadd_ps(w.even, x.even, sum));
  }
};

struct F32 {
  using I = MultiplyAdds;
  static constexpr int kGroup = 128, kBlockBytes = 1024;
  static void prefetch(const uint8_t* block) { prefetch_ahead<kBlockBytes>(block); }
  static I::Pairs pair(const uint8_t* block, int i) {
    return {_mm512_loadu_ps(block + i * 128), _mm512_loadu_ps(block + i * 128 + 64)};
  }
  template <int T>
  static void add(__m512* total, const __m512* part, const cpu_common::Panel&, int64_t) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[t] = _mm512_add_ps(total[t], part[t]);
  }
};

}  // namespace

void nvfp4_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Nvfp4<MultiplyAdds>>(job);
}
void fp8_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Fp8<MultiplyAdds>>(job);
}
void bf16_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Bf16<MultiplyAdds>>(job);
}
void f32_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<F32>(job);
}

void store(const cpu_common::StoreJob& job) {
  cpu_common::store_panels(job);
}
void gate(const cpu_common::GateJob& job) {
  cpu_common::gate_panels(job);
}

}  // namespace tessera::backends::avx512
