// SPDX-License-Identifier: Apache-2.0
// The most BF16 products that dot-product instructions reach: 24 independent chains in registers.
#include <immintrin.h>

#include "bench/ops/ceilings.h"

namespace tessera::bench {

float avx512_bf16_loop(int64_t num_steps) {
  constexpr int kChains = 24;
  const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
  const __m512bh b = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3C003C00));
  __m512 sums[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t step = 0; step < num_steps; ++step) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
  __m512 all = sums[0];
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) all = _mm512_add_ps(all, sums[i]);
  float lanes[16];
  _mm512_storeu_ps(lanes, all);
  return lanes[0] + lanes[15];
}

int64_t avx512_bf16_flops(int64_t num_steps) {
  return num_steps * 24 * 64;
}

}  // namespace tessera::bench
