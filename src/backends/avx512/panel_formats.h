// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weight formats as panel_kernel.h wants them, for an instruction set I whose Pairs are made from BF16 pairs.
#include "backends/cpu_common/avx512_decode.h"
#include "backends/cpu_common/panel_kernel.h"

namespace tessera::backends::avx512 {

namespace {

constexpr int kScaleBlock = 128;          // FP8 weights: inputs per scale
constexpr int64_t kPrefetchBytes = 2048;  // ahead of what is decoded

template <int kBytes>
inline void prefetch_ahead(const uint8_t* block) {
#pragma GCC unroll 16
  for (int line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(block) + kPrefetchBytes + line, _MM_HINT_T0);
  }
}

template <class Isa>
struct Nvfp4 {
  using I = Isa;
  static constexpr int kGroup = 16, kBlockBytes = 128;
  static void prefetch(const uint8_t* block) { prefetch_ahead<kBlockBytes>(block); }
  static typename I::Pairs pair(const uint8_t* block, int i) { return I::from_bf16(cpu_common::nvfp4_pair(block, i)); }
  template <int T>
  static void add(__m512* total, const __m512* part, const cpu_common::Panel& panel, int64_t group) {
    const __m512 scale = cpu_common::nvfp4_scales(panel.scales, group * panel.stride);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[t] = _mm512_fmadd_ps(part[t], scale, total[t]);
  }
};

template <class Isa>
struct Fp8 {
  using I = Isa;
  static constexpr int kGroup = kScaleBlock, kBlockBytes = 256;
  static void prefetch(const uint8_t* block) { prefetch_ahead<kBlockBytes>(block); }
  static typename I::Pairs pair(const uint8_t* block, int i) { return I::from_bf16(cpu_common::fp8_pair(block, i)); }
  template <int T>
  static void add(__m512* total, const __m512* part, const cpu_common::Panel& panel, int64_t group) {
    const __m512 scale = _mm512_set1_ps(static_cast<const float*>(panel.scales)[group]);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[t] = _mm512_fmadd_ps(part[t], scale, total[t]);
  }
};

template <class Isa>
struct Bf16 {
  using I = Isa;
  static constexpr int kGroup = 128, kBlockBytes = 512;
  static void prefetch(const uint8_t* block) { prefetch_ahead<kBlockBytes>(block); }
  static typename I::Pairs pair(const uint8_t* block, int i) { return I::from_bf16(cpu_common::bf16_pair(block, i)); }
  template <int T>
  static void add(__m512* total, const __m512* part, const cpu_common::Panel&, int64_t) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) total[t] = _mm512_add_ps(total[t], part[t]);
  }
};

}  // namespace

}  // namespace tessera::backends::avx512
