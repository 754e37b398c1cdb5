// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many registers the warps of a warpgroup have (sm_90a, sm_120a, sm_121a). Source: PTX ISA, "setmaxnreg".
// ptxas ignores them in kernels that call functions.

namespace tessera::backends::cuda_common::ptx {

// Gives registers back to the multiprocessor, or takes some of those: kCount for each thread of the warpgroup.
template <int kCount>
__device__ inline void give_registers_back() {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void take_registers() {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
