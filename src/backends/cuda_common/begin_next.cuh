// SPDX-License-Identifier: Apache-2.0
#pragma once
// wait_for_previous() (launch.cuh) in two steps, for kernels that wait for their first loads most of the time: what the
// next kernel copies before its own wait would be in their way.

namespace tessera::backends::cuda_common {

__device__ inline void wait_alone() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace tessera::backends::cuda_common
