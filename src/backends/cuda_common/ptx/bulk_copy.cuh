// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies of whole stretches from global to shared memory by the copy engine (sm_90 on), and the barriers in shared
// memory that say when they have arrived or when their place is free again. Source: PTX ISA, "mbarrier.init",
// "mbarrier.arrive", "mbarrier.try_wait", "Tracking asynchronous operations by the mbarrier object",
// "cp.async.bulk", "createpolicy", "fence.proxy.async".
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/emulated/bulk_copy.h"
#elif defined(TESSERA_SM100_EMULATED)
#include "backends/cuda_common/ptx/emulated/tcgen05_commands.cuh"
#endif

namespace tessera::backends::cuda_common::ptx {

// A barrier in shared memory. Its phases end one after another, each when all of `count` have arrived and all bytes
// that were announced are there.
struct alignas(8) SharedBarrier {
  uint64_t bits;

  // By one thread, before a barrier of the block that all pass.
  __device__ void init(int count) {
#ifdef TESSERA_CUDA_EMULATED
    emulated::init_barrier(&bits, count);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees it
#endif
  }
  __device__ void arrive() {
#ifdef TESSERA_CUDA_EMULATED
    emulated::arrive(&bits, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
#endif
  }
  // The same, once this thread has `word`, which depends on each of its loads from the memory that it frees here. An
  // arrival does not wait for loads before it, and a copy into that memory waits for the barrier alone: such copies
  // have been seen to overwrite what a lane had yet to get (docs/performance/hopper.md, "A stage freed too early").
  __device__ void arrive_behind(uint32_t word) {
#ifdef TESSERA_CUDA_EMULATED
    arrive();
#else
    // Zero, which no compiler knows: less than 2 GiB.
    uint32_t bytes;
    asm("mov.u32 %0, %%total_smem_size;" : "=r"(bytes));
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address() + (word & bytes >> 31)) : "memory");
#endif
  }
  // The same as arrive(), and `bytes` more will be copied in this phase.
  __device__ void arrive_and_expect(int bytes) {
#ifdef TESSERA_CUDA_EMULATED
    emulated::arrive(&bits, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }
  // Waits for the end of the phase with this parity: 0 for the first, 1 for the second, ...; 1 of a new barrier has
  // ended.
#ifdef TESSERA_CUDA_EMULATED
  void wait(int parity, const device::emulated::Site& site = device::emulated::Site::current()) {
    emulated::wait(&bits, parity, site);
  }
#else
#ifdef TESSERA_SM100_EMULATED
  __device__ void wait(int parity, const emulated::Site& site = emulated::Site::current()) {
    emulated::wait_and_work(address(), parity, site);
  }
#else
  __device__ void wait(int parity) {
    asm volatile(
        "{\n.reg .pred ended;\n"
        "try_again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra try_again;\n}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
#endif

  __device__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(this));
  }
#endif
};

// Copies `bytes`, like both addresses a multiple of 16; `arrived` counts them when they are there.
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, SharedBarrier& arrived) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::copy_bulk(shared, global, bytes, &arrived.bits);
#else
  // Not shared::cluster: on sm_120a ptxas makes a test and a call of that, on sm_90a the same code of both.
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(bytes), "r"(arrived.address())
               : "memory");
#endif
}

// The same of what is read once, or again only at once, as weights are by a step of few tokens: it is the first to
// leave the L2 cache, where it would take the place of what is read again and again.
__device__ inline void copy_bulk_once(void* shared, const void* global, int bytes, SharedBarrier& arrived) {
#ifdef TESSERA_CUDA_EMULATED
  copy_bulk(shared, global, bytes, arrived);
#else
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(arrived.address()), "l"(policy)
      : "memory");
#endif
}

// A hint that such a copy will follow: into the L2 cache.
__device__ inline void prefetch_bulk([[maybe_unused]] const void* global, [[maybe_unused]] int bytes) {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
