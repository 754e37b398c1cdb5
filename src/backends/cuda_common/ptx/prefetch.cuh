// SPDX-License-Identifier: Apache-2.0
#pragma once
// A hint that global memory will be read soon. Source: PTX ISA, "prefetch".

namespace tessera::backends::cuda_common::ptx {

// Into the L2 cache.
__device__ inline void prefetch([[maybe_unused]] const void* global) {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
