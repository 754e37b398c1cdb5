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
  float (&sums)[4];
  std::array<uint32_t, 4> a;
  std::array<uint32_t, 2> b;
};

inline double bf16_half(uint32_t word, int half) {
  return static_cast<double>(numeric::bf16_to_float(static_cast<uint16_t>(word >> (16 * half))));
}

inline void mma_bf16(float (&sums)[4], const std::array<uint32_t, 4>& a, const std::array<uint32_t, 2>& b) {
  using device::emulated::kWarp;
  MmaBf16 mine{sums, a, b};
  device::emulated::collective(device::emulated::Site::current(), ~0u, &mine, [](void* const(&lanes)[kWarp]) {
    double rows[16][16], columns[8][16];
    for (int lane = 0; lane < kWarp; ++lane) {
      const MmaBf16& held = *static_cast<MmaBf16*>(lanes[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          const int k = 2 * t + i / 2 * 8 + half;
          rows[g + i % 2 * 8][k] = bf16_half(held.a[static_cast<size_t>(i)], half);
          if (i % 2 == 0) columns[g][k] = bf16_half(held.b[static_cast<size_t>(i / 2)], half);
        }
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      const MmaBf16& held = *static_cast<MmaBf16*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = static_cast<double>(held.sums[i]);
        for (int k = 0; k < 16; ++k) sum += rows[row][k] * columns[column][k];
        held.sums[i] = static_cast<float>(sum);
      }
    }
  });
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
