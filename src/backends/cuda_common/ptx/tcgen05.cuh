// SPDX-License-Identifier: Apache-2.0
#pragma once
// Blackwell's tensor cores (sm_100a, sm_103a) and their tensor memory, of one thread block (kBlocks 1, cta_group::1) or
// of a pair of a cluster's (2, cta_group::2): what a kernel uses of both is of one kind. Who multiplies: one thread, of
// the pair's even block, issues copies of scales, products and commits, which are made in that order while it goes on;
// operands lie in shared memory, scales and sums in tensor memory. Source: PTX ISA, "TensorCore 5th Generation Family
// Instructions". What crosses threads needs fence_before_thread_sync() before the barrier and fence_after_thread_sync()
// behind it. Addresses in tensor memory: lane in bits 16 to 31, column in 0 to 15.
#include <cstdint>

#include "backends/cuda_common/ptx/bulk_copy.cuh"

// Where an instruction stands, for its emulation to name.
#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/emulated/tcgen05.h"
#elif defined(TESSERA_SM100_EMULATED)
#include "backends/cuda_common/ptx/emulated/tcgen05_on_device.cuh"
#endif
#if defined(TESSERA_CUDA_EMULATED) || defined(TESSERA_SM100_EMULATED)
#define TESSERA_TCGEN05_EMULATED
#define TESSERA_SITE const emulated::Site& site = emulated::Site::current()
#define TESSERA_AND_SITE , TESSERA_SITE
#else
#define TESSERA_SITE
#define TESSERA_AND_SITE
#endif

namespace tessera::backends::cuda_common::ptx {

// In the window of shared memory, as descriptors want it.
__device__ inline uint32_t shared_address(const void* shared) {
#ifdef TESSERA_CUDA_EMULATED
  return emulated::shared_address(shared);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#endif
}

namespace tcgen05 {

// By a whole warp: writes the address of `columns` columns (a power of two, 32 to 512) to *shared; waits while another
// block has them. The same warp gives them back before the block ends. Both blocks of a pair do so, each where the
// other has not ended, and get the same columns.
template <int kBlocks = 1>
__device__ void alloc(uint32_t* shared, int columns TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_alloc(shared, columns, kBlocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(shared)),
                 "r"(columns)
                 : "memory");
    return;
  }
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(shared)),
               "r"(columns)
               : "memory");
#endif
}
template <int kBlocks = 1>
__device__ void relinquish_alloc_permit(TESSERA_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_relinquish_alloc_permit(kBlocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
    return;
  }
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
#endif
}
template <int kBlocks = 1>
__device__ void dealloc(uint32_t address, int columns TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_dealloc(address, columns, kBlocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    return;
  }
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
#endif
}

// By one thread: copies the ScaleAtom that `descriptor` names (tcgen05_operands.h) to four columns, for all lanes.
// In both blocks of a pair, each from its own shared memory to its own tensor memory.
template <int kBlocks = 1>
__device__ void cp_scales(uint32_t address, uint64_t descriptor TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_cp_scales(address, descriptor, kBlocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    return;
  }
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
#endif
}

// By one thread: sums (128 lanes by N columns from `d` on) = A B, `adds`: += A B, for 64 columns of NVFP4 with a scale
// per 16. Descriptors: tcgen05_operands.h; `instruction` names N. Of a pair each block has 128 of 256 rows of A and of
// the sums, with their scales, half of B's rows and all of B's scales, at the same places.
template <int kBlocks = 1>
__device__ void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                          uint32_t b_scales, bool adds TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_mma_nvfp4(d, a, b, instruction, a_scales, b_scales, adds, kBlocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
        "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], adds;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<int>(adds))
        : "memory");
    return;
  }
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], adds;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<int>(adds))
      : "memory");
#endif
}

// By the thread that issued them: `barrier` counts an arrival when all copies and products so far are made. Of a pair
// those do that `blocks` of the cluster have at this place (bit r: rank r; not said: the cluster's first two).
template <int kBlocks = 1>
__device__ void commit(SharedBarrier& barrier, uint32_t blocks = 3 TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_commit(&barrier.bits, kBlocks, blocks, site);
#else
  if constexpr (kBlocks == 2) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            barrier.address()),
        "h"(static_cast<uint16_t>(blocks))
        : "memory");
    return;
  }
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier.address())
               : "memory");
#endif
}

__device__ inline void fence_before_thread_sync() {
#ifndef TESSERA_TCGEN05_EMULATED
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
#endif
}
__device__ inline void fence_after_thread_sync() {
#ifndef TESSERA_TCGEN05_EMULATED
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#endif
}

// By a whole warp, warp w of its warpgroup: lane l of the warp gets columns [0, kCount) from `address` on of lane
// 32 w + l, the lane that the address names for l = 0. The registers are there after wait_ld().
template <int kCount>
__device__ inline void ld(uint32_t (&r)[kCount], uint32_t address TESSERA_AND_SITE) {
  static_assert(kCount == 8 || kCount == 16);
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_ld(r, kCount, address, site);
#else
  if constexpr (kCount == 8) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
                 : "r"(address));
  } else {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
        "%15}, [%16];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8]),
          "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
        : "r"(address));
  }
#endif
}
// Waits for this thread's loads; `r` is what they load.
template <int kCount>
__device__ inline void wait_ld(uint32_t (&r)[kCount] TESSERA_AND_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_wait_ld(site);
#else
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i]));  // nothing uses them before
#endif
}

// The inverse of ld(); there after wait_st().
template <int kCount>
__device__ inline void st(uint32_t address, const uint32_t (&r)[kCount] TESSERA_AND_SITE) {
  static_assert(kCount == 8);
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_st(r, kCount, address, site);
#else
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
               : "memory");
#endif
}
__device__ inline void wait_st(TESSERA_SITE) {
#ifdef TESSERA_TCGEN05_EMULATED
  emulated::tcgen05_wait_st(site);
#else
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
#endif
}

}  // namespace tcgen05
}  // namespace tessera::backends::cuda_common::ptx

#undef TESSERA_TCGEN05_EMULATED
#undef TESSERA_SITE
#undef TESSERA_AND_SITE
