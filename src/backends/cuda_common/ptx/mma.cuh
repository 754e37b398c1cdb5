// SPDX-License-Identifier: Apache-2.0
#pragma once
// BF16 instructions of sm_80 and later. Source: PTX ISA, "mma.m16n8k16", "fma" and "cvt" for bf16x2, "prmt".
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/emulated/mma.h"
#endif

namespace tessera::backends::cuda_common::ptx {

// sums += A B for A of 16 x 16 (row major) and B of 16 x 8, BF16, two to a word, the lower k in the lower half. With
// g = lane / 4 and t = lane % 4 a lane holds
//   a   (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8), each with its successor in k
//   b   (k 2t, column g), (k 2t + 8, column g), likewise
//   sums (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ inline void mma_bf16(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::mma_bf16(sums, {a0, a1, a2, a3}, {b0, b1});
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Both halves' products, rounded to BF16; subnormal numbers count. (sm_80 multiplies by fma; -0 adds nothing.)
__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
#ifdef TESSERA_CUDA_EMULATED
  return emulated::multiply_bf16x2(a, b);
#else
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
#endif
}

// The lower or the upper half of a word twice. As an operand of multiply_bf16x2() it costs no instruction, which a
// permutation of bytes does.
template <bool kIsUpper>
__device__ inline uint32_t half_twice(uint32_t word) {
#ifdef TESSERA_CUDA_EMULATED
  const uint32_t half = kIsUpper ? word >> 16 : word & 0xFFFF;
  return half << 16 | half;
#else
  uint32_t pair;
  if constexpr (kIsUpper) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(pair) : "r"(word));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(pair) : "r"(word));
  }
  return pair;
#endif
}

// Bytes kFirst and kFirst + 1 of a word as signed numbers, each in a half.
template <int kFirst>
__device__ inline uint32_t signed_halves(uint32_t word) {
  static_assert(kFirst == 0 || kFirst == 2);
#ifdef TESSERA_CUDA_EMULATED
  const auto half = [&](int byte) { return static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * byte)); };
  return (half(kFirst) & 0xFFFF) | half(kFirst + 1) << 16;
#else
  uint32_t halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(word), "n"(kFirst == 0 ? 0x9180 : 0xB3A2));
  return halves;
#endif
}

// The same of byte kByte of each of two words.
template <int kByte>
__device__ inline uint32_t signed_halves(uint32_t low, uint32_t high) {
  static_assert(0 <= kByte && kByte < 4);
#ifdef TESSERA_CUDA_EMULATED
  const auto half = [](uint32_t word) { return static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * kByte)); };
  return (half(low) & 0xFFFF) | half(high) << 16;
#else
  constexpr int kLow = (8 + kByte) << 4 | kByte, kHigh = (12 + kByte) << 4 | (4 + kByte);
  uint32_t halves;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(halves) : "r"(low), "r"(high), "n"(kHigh << 8 | kLow));
  return halves;
#endif
}

// Two values as BF16, the first in the lower half; of a NaN some NaN.
__device__ inline uint32_t round_to_bf16x2(float first, float second) {
#ifdef TESSERA_CUDA_EMULATED
  return emulated::round_to_bf16x2(first, second);
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
