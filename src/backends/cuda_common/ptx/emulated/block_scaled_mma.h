// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/block_scaled_mma.cuh computes on the emulated GPU: lane by lane, from the registers that the instruction
// reads and no others.
#include <array>
#include <cstdint>

#include "backends/cuda_common/ptx/emulated/product_sums.h"
#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

struct MmaNvfp4 {
  float (&sums)[4];
  std::array<uint32_t, 4> a;
  std::array<uint32_t, 2> b;
  uint32_t a_scales, b_scales;
  int a_thread, b_thread;
};

inline void put_codes(uint32_t word, int8_t* values) {
  for (int j = 0; j < 8; ++j) values[j] = static_cast<int8_t>(e2m1_halves(word >> 4 * j));
}

inline void mma_nvfp4(float (&sums)[4], const std::array<uint32_t, 4>& a, const std::array<uint32_t, 2>& b,
                      uint32_t a_scales, uint32_t b_scales, int a_thread, int b_thread) {
  using device::emulated::kWarp;
  MmaNvfp4 mine{sums, a, b, a_scales, b_scales, a_thread, b_thread};
  device::emulated::collective(device::emulated::Site::current(), ~0u, &mine, [](void* const(&lanes)[kWarp]) {
    int8_t rows[16][64], columns[8][64];
    uint32_t row_scales[16], column_scales[8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const MmaNvfp4& held = *static_cast<MmaNvfp4*>(lanes[lane]);
      const int g = lane / 4, l = lane % 4;
      for (int i = 0; i < 4; ++i) put_codes(held.a[static_cast<size_t>(i)], rows[g + i % 2 * 8] + 8 * l + i / 2 * 32);
      for (int i = 0; i < 2; ++i) put_codes(held.b[static_cast<size_t>(i)], columns[g] + 8 * l + i * 32);
      if (l / 2 == held.a_thread) row_scales[g + l % 2 * 8] = held.a_scales;
      if (l == held.b_thread) column_scales[g] = held.b_scales;
    }
    const bool is_fast = sums_are_fast();
    for (int lane = 0; lane < kWarp; ++lane) {
      const MmaNvfp4& held = *static_cast<MmaNvfp4*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        int dots[4];
        for (int j = 0; j < 4; ++j) dots[j] = group_sum(rows[row] + 16 * j, columns[column] + 16 * j);
        held.sums[i] = mma_sync_sum(is_fast, held.sums[i], dots, row_scales[row], column_scales[column]);
      }
    }
  });
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
