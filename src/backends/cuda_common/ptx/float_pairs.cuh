// SPDX-License-Identifier: Apache-2.0
#pragma once
// Two floats in an instruction (sm_100a, sm_103a). Source: PTX ISA, "mul" (.f32x2).
#include <cuda_runtime.h>

namespace tessera::backends::cuda_common::ptx {

// Two products, each rounded as one alone; in an instruction where the GPU has it.
__device__ inline float2 multiply_two(float2 a, float2 b) {
#if defined(TESSERA_CUDA_EMULATED) || __CUDA_ARCH__ < 1000
  return {a.x * b.x, a.y * b.y};
#else
  return __fmul2_rn(a, b);
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
