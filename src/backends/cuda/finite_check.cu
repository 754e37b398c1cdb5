// SPDX-License-Identifier: Apache-2.0
// finite_check: a thread block per row; the least index of what its threads found. Bound by what one multiprocessor
// reads, so a thread has many loads on their way at once.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 1024, kAtOnce = 16;

__global__ void __launch_bounds__(kBlock) find_first_bad(const float* values, int32_t* first_bad, int64_t width) {
  wait_for_previous();
  __shared__ unsigned int s_first;
  if (threadIdx.x == 0) s_first = ~0u;
  __syncthreads();
  const float* row = values + blockIdx.x * width;
  unsigned int first = ~0u;
  for (int64_t begin = threadIdx.x; begin < width && first == ~0u; begin += kAtOnce * kBlock) {
    float loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t i = begin + n * kBlock;
      loaded[n] = i < width ? row[i] : 0;
    }
#pragma unroll
    for (int n = kAtOnce - 1; n >= 0; --n) {
      if (!isfinite(loaded[n])) first = static_cast<unsigned int>(begin + n * kBlock);
    }
  }
  if (first != ~0u) atomicMin(&s_first, first);  // a least index: the order changes nothing
  __syncthreads();
  if (threadIdx.x == 0) first_bad[blockIdx.x] = static_cast<int32_t>(s_first);  // none: -1
}

}  // namespace

void finite_check(const ops::FiniteCheck::Desc& desc, const ops::FiniteCheck::Args& args, device::Queue& queue) {
  launch("finite_check", queue, find_first_bad, grid_for(args.num_rows, 1), kBlock, 0, args.values, args.first_bad,
         desc.width);
}

}  // namespace tessera::backends::cuda
