// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the GPU that is emulated on the CPU adds: the bits of the models (tcgen05_sums.h, block_scaled_sums.h), or,
// where TESSERA_EMULATED_SUMS is "fast", the same terms in FP32. A group's sum is a whole number of 12 bits, and with
// both scales' significands one of 20: FP32 holds every term as it is, and only that the terms are added one after
// another, to nearest, is not the hardware's. Each addition is off by 2^-24 of what it gives, at most.
#include <cmath>
#include <cstdint>

#include "backends/cuda_common/ptx/emulated/block_scaled_sums.h"
#include "backends/cuda_common/ptx/emulated/tcgen05_sums.h"
#include "numeric/e4m3.h"

#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/capability.h"
#endif

namespace tessera::backends::cuda_common::ptx::emulated {

// Optimised and without checks, on arrays of these files' own: nearly all of a product's time is spent here.
#ifdef __SANITIZE_ADDRESS__
#define TESSERA_EMULATED_INNER_LOOP \
  [[gnu::optimize("O3"), gnu::no_sanitize("address", "undefined"), gnu::no_sanitize_coverage]]
#else
#define TESSERA_EMULATED_INNER_LOOP
#endif

#ifdef TESSERA_CUDA_EMULATED
using device::emulated::sums_are_fast;
#else
constexpr bool sums_are_fast() {
  return false;
}
#endif

// Of 16 products of values in halves.
TESSERA_EMULATED_INNER_LOOP inline int group_sum(const int8_t* a, const int8_t* b) {
  int sum = 0;
  for (int i = 0; i < kProductsOfGroup; ++i) sum += a[i] * b[i];
  return sum;
}

// Scales of a row and of a column, a byte each; their sign bits don't count.
TESSERA_EMULATED_INNER_LOOP inline float fast_sum(float sum, const int (&groups)[kGroupsOfProduct], uint32_t a_scales,
                                                  uint32_t b_scales) {
  constexpr float kQuarter = 0.25f;  // groups are in these
  for (int i = 0; i < kGroupsOfProduct; ++i) {
    const float a = numeric::kE4m3Values[a_scales >> 8 * i & 0x7F], b = numeric::kE4m3Values[b_scales >> 8 * i & 0x7F];
    sum += static_cast<float>(groups[i]) * (a * b * kQuarter);
  }
  return std::isnan(sum) ? __builtin_bit_cast(float, kCanonicalNan) : sum + 0.0f;  // a zero has no sign
}

// tcgen05.mma's new sum, as bits.
inline uint32_t tcgen05_sum(bool is_fast, uint32_t old_sum, const int (&groups)[kGroupsOfProduct],
                            const uint8_t (&a_scales)[kGroupsOfProduct], const uint8_t (&b_scales)[kGroupsOfProduct]) {
  if (!is_fast) return add_scaled_groups(old_sum, groups, a_scales, b_scales);
  const float sum = fast_sum(__builtin_bit_cast(float, old_sum), groups, __builtin_bit_cast(uint32_t, a_scales),
                             __builtin_bit_cast(uint32_t, b_scales));
  return __builtin_bit_cast(uint32_t, sum);
}

// mma.sync's.
inline float mma_sync_sum(bool is_fast, float old_sum, const int (&groups)[kGroupsOfProduct], uint32_t a_scales,
                          uint32_t b_scales) {
  return is_fast ? fast_sum(old_sum, groups, a_scales, b_scales)
                 : block_scaled_sum(groups, a_scales, b_scales, old_sum);
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
