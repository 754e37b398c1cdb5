// SPDX-License-Identifier: Apache-2.0
#pragma once
// Thread blocks of a cluster (sm_90 on): who one is, waiting for each other, writing to each other's shared memory,
// arriving at each other's barriers, and copying for each other.
// Source: PTX ISA, "%cluster_ctarank", "barrier.cluster", "mapa", "mbarrier.arrive", "mbarrier.try_wait", "fence",
// "cp.async.bulk" (.multicast::cluster).
#include <cstdint>

#include "backends/cuda_common/ptx/bulk_copy.cuh"

namespace tessera::backends::cuda_common::ptx {

__device__ inline int cluster_rank() {
#ifdef TESSERA_CUDA_EMULATED
  return device::emulated::current.rank;
#else
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#endif
}

// By all threads of all blocks; what was written before is seen behind it.
#ifdef TESSERA_CUDA_EMULATED
inline void sync_cluster(const device::emulated::Site& site = device::emulated::Site::current()) {
  device::emulated::sync_cluster(site);
}
#else
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

// The place of `shared`, of dynamic shared memory, in block `rank`, which has to be there: begun and not ended.
template <class T>
__device__ T* in_block(T* shared, int rank) {
#ifdef TESSERA_CUDA_EMULATED
  const char *own = static_cast<const char*>(device::emulated::dynamic_shared()),
             *at = reinterpret_cast<const char*>(shared);
  return reinterpret_cast<T*>(static_cast<char*>(device::emulated::dynamic_shared_of(rank)) + (at - own));
#else
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(there);
#endif
}

// One arrival at the barrier that block `rank` has at the place of `here`. Who waits for it there uses
// wait_for_cluster. What this thread has seen or written in its own block's shared memory is passed on, and nothing
// else is: an arrival with release semantics would wait for all of the GPU's memory (MEMBAR.GPU), and a wait with
// acquire semantics empty L1. Tensor memory has fences of its own.
__device__ inline void arrive_at(SharedBarrier& here, int rank) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::arrive_at(&here.bits, rank);
#else
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(here.address()),
      "r"(rank)
      : "memory");
#endif
}

// SharedBarrier::wait, where threads of other blocks arrive too.
#ifdef TESSERA_CUDA_EMULATED
inline void wait_for_cluster(SharedBarrier& barrier, int parity,
                             const device::emulated::Site& site = device::emulated::Site::current()) {
  barrier.wait(parity, site);
}
#else
__device__ inline void wait_for_cluster(SharedBarrier& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred ended;\n"
      "try_again: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 ended, [%0], %1;\n"
      "@!ended bra try_again;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;\n}" ::"r"(barrier.address()),
      "r"(parity)
      : "memory");
}
#endif

// copy_bulk to several blocks of the cluster, which all have to be there: to the place of `shared` in each of `blocks`
// (bit r: rank r), where the barrier at the place of `arrived` counts the bytes. Memory is asked for them once.
__device__ inline void copy_bulk_to(uint32_t blocks, void* shared, const void* global, int bytes,
                                    SharedBarrier& arrived) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::copy_bulk_to(blocks, shared, global, bytes, &arrived.bits);
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(arrived.address()), "h"(static_cast<uint16_t>(blocks))
      : "memory");
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
