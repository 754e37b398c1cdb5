// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies from global to shared memory that a thread does not wait for (sm_80 and later), in groups that complete in
// order; and loads that are to be under way meanwhile. Source: PTX ISA, "cp.async", "cp.async.commit_group",
// "cp.async.wait_group", "ld.global.nc".
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/block.h"
#endif

namespace tessera::backends::cuda_common::ptx {

// kBytes 4, 8 or 16, both addresses multiples of it. Sixteen bytes bypass L1.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#ifdef TESSERA_CUDA_EMULATED
  device::emulated::copy_async(shared, global, kBytes);
#else
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
  }
#endif
}

// Sixteen bytes that nobody writes, loaded here and not where they are used: the compiler moves it past no wait.
__device__ inline uint4 load_here(const uint4* global) {
#ifdef TESSERA_CUDA_EMULATED
  return *global;
#else
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
#endif
}

// The same of eight bytes.
__device__ inline uint2 load_here(const uint2* global) {
#ifdef TESSERA_CUDA_EMULATED
  return *global;
#else
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global) : "memory");
  return v;
#endif
}

// Ends a group: this thread's copies since the last one.
__device__ inline void commit_copies() {
#ifdef TESSERA_CUDA_EMULATED
  device::emulated::commit_late(device::emulated::LateKind::kCopies);
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kNewest of this thread's groups are under way.
template <int kNewest>
__device__ inline void wait_for_copies() {
#ifdef TESSERA_CUDA_EMULATED
  device::emulated::wait_for_late(device::emulated::LateKind::kCopies, kNewest);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
