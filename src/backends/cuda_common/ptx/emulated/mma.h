// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the instructions of ptx/mma.cuh compute, for the emulated GPU. A tensor core's own rounding of a product's sum
// is not documented: here it is the exact sum of 16 products and the old value, in FP64, rounded once.
#include <array>
#include <cstdint>

#include "device/cuda/emulated/block.h"
#include "numeric/bf16.h"

namespace tessera::backends::cuda_common::ptx::emulated {

struct MmaBf16 {
  float* sums;
  uint32_t a[4], b[2];
};

inline double bf16_half(uint32_t word, int half) {
  return static_cast<double>(numeric::bf16_to_float(static_cast<uint16_t>(word >> (16 * half))));
}

// Of all lanes of a warp. Plain arrays and no checks, in a build with sanitizers neither: it reads registers alone, and
// was a fifth of the time of attention's tests there.
[[gnu::optimize("O3"), gnu::no_sanitize("address", "undefined")]] inline void multiply_lanes(
    void* const (&lanes)[device::emulated::kWarp]) {
  double rows[16][16], columns[16][8], sums[16][8];
  for (int lane = 0; lane < device::emulated::kWarp; ++lane) {
    const MmaBf16& held = *static_cast<const MmaBf16*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      sums[g + i / 2 * 8][2 * t + i % 2] = static_cast<double>(held.sums[i]);
      for (int half = 0; half < 2; ++half) {
        const int k = 2 * t + i / 2 * 8 + half;
        // Each the upper half of an FP32 number.
        const uint32_t a = half == 0 ? held.a[i] << 16 : held.a[i] & 0xFFFF0000u;
        const uint32_t b = half == 0 ? held.b[i / 2] << 16 : held.b[i / 2] & 0xFFFF0000u;
        rows[g + i % 2 * 8][k] = static_cast<double>(__builtin_bit_cast(float, a));
        columns[k][g] = static_cast<double>(__builtin_bit_cast(float, b));
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sums[row][column] += rows[row][k] * columns[k][column];
    }
  }
  for (int lane = 0; lane < device::emulated::kWarp; ++lane) {
    float* const out = static_cast<const MmaBf16*>(lanes[lane])->sums;
    for (int i = 0; i < 4; ++i) out[i] = static_cast<float>(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  }
}

inline void mma_bf16(float (&sums)[4], const std::array<uint32_t, 4>& a, const std::array<uint32_t, 2>& b) {
  MmaBf16 mine{sums, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  device::emulated::collective(device::emulated::Site::current(), ~0u, &mine, multiply_lanes);
}

inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const auto product = [&](int half) {
    return uint32_t{numeric::bf16_from_float(static_cast<float>(bf16_half(a, half) * bf16_half(b, half)))};
  };
  return product(0) | product(1) << 16;
}

inline uint32_t round_to_bf16x2(float first, float second) {
  return uint32_t{numeric::bf16_from_float(first)} | uint32_t{numeric::bf16_from_float(second)} << 16;
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
