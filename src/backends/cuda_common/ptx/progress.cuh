// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counters in global memory by which blocks of one kernel tell each other how far they are. Who waits may do so only
// for what blocks that have begun do without waiting themselves: nothing says that others have room beside them.
// Source: PTX ISA, "Memory Consistency Model", "red" (.release), "ld" (.acquire), "fence.proxy.async".
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/block.h"
#endif

namespace tessera::backends::cuda_common::ptx {

// By one lane, behind a barrier of those whose stores it tells of.
__device__ inline void add_progress(uint32_t* counter) {
#ifdef TESSERA_CUDA_EMULATED
  ++*counter;
#else
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

// Waits until `counter` is `count` or more. What was stored before may be brought by bulk copies of this thread then.
#ifdef TESSERA_CUDA_EMULATED
inline void wait_for_progress(const uint32_t* counter, uint32_t count,
                              const device::emulated::Site& site = device::emulated::Site::current()) {
  struct Awaited {
    const uint32_t* counter;
    uint32_t count;
  };
  const device::emulated::Aside aside;
  const Awaited awaited{counter, count};
  device::emulated::wait_until(
      site,
      [](const void* context) {
        const auto& its = *static_cast<const Awaited*>(context);
        return *its.counter >= its.count;
      },
      &awaited, "a counter in global memory");
}
#else
__device__ inline void wait_for_progress(const uint32_t* counter, uint32_t count) {
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < count);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif

}  // namespace tessera::backends::cuda_common::ptx
