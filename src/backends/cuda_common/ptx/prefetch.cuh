// SPDX-License-Identifier: Apache-2.0
#pragma once
// Hints that global memory will be read soon. Source: PTX ISA, "prefetch".
#include <cstdint>

namespace tessera::backends::cuda_common::ptx {

// Into the L2 cache.
__device__ inline void prefetch([[maybe_unused]] const void* global) {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// All lines of so many bytes, of which there is one, likewise.
__device__ inline void prefetch_range(const uint8_t* global, int64_t bytes) {
  constexpr int64_t kLine = 128;  // of the L2 cache
#pragma unroll
  for (int64_t at = 0; at < bytes; at += kLine) prefetch(global + at);
  prefetch(global + bytes - 1);
}

}  // namespace tessera::backends::cuda_common::ptx
