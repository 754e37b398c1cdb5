// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products of NVFP4 operands by a warp (sm_120a, sm_121a). Source: PTX ISA, "Block scaling for mma.sync", "Matrix
// fragments for mma.m16n8k64". Order and rounding of sums: ptx/emulated/block_scaled_sums.h.
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/emulated/block_scaled_mma.h"
#elif defined(TESSERA_SM120_EMULATED)
#include "backends/cuda_common/ptx/emulated/block_scaled_shuffles.cuh"
#endif

namespace tessera::backends::cuda_common::ptx {

// sums += A B for A of 16 x 64 (row major) and B of 64 x 8, E2M1, eight codes to a word, the lowest k in the lowest
// bits; every 16 products times their scales, UE4M3. With g = lane / 4 and l = lane % 4 a lane holds
//   a     (row g, k 8 l), (row g + 8, k 8 l), (row g, k 8 l + 32), (row g + 8, k 8 l + 32), each with its seven
//         successors in k
//   b     (k 8 l, column g), (k 8 l + 32, column g), likewise
//   sums  (row g, column 2 l), (g, 2 l + 1), (g + 8, 2 l), (g + 8, 2 l + 1)
// and scales of k 0, 16, 32 and 48 from the lowest byte up; of A those of row g where l = 2 kAThread, of row g + 8
// where l = 2 kAThread + 1; of B those of column g where l = kBThread. Other lanes' scales are not read.
template <int kAThread, int kBThread>
__device__ inline void mma_nvfp4(float (&sums)[4], const uint4& a, uint32_t b0, uint32_t b1, uint32_t a_scales,
                                 uint32_t b_scales) {
  static_assert(kAThread >= 0 && kAThread < 2 && kBThread >= 0 && kBThread < 4);
#ifdef TESSERA_CUDA_EMULATED
  emulated::mma_nvfp4(sums, {a.x, a.y, a.z, a.w}, {b0, b1}, a_scales, b_scales, kAThread, kBThread);
#elif defined(TESSERA_SM120_EMULATED)
  emulated::mma_nvfp4_by_shuffles(sums, {a.x, a.y, a.z, a.w}, {b0, b1}, a_scales, b_scales, kAThread, kBThread);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, %12}, %11, {0, %13};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "n"(kAThread),
        "n"(kBThread));
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
