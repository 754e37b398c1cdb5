// SPDX-License-Identifier: Apache-2.0
// compressor_pool: a thread per channel of an entry, online two. What bounds it: the read of the rows, and exp in FP64.
#include "backends/cuda/compressor_pool.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace pooling;

constexpr int kChannels = 64;  // of a block; the online form has another half for the end of a slice

__device__ int64_t channel_of_thread() {
  return static_cast<int64_t>(blockIdx.y) * kChannels + threadIdx.x % kChannels;
}

// Grid of both: rows of the output by groups of channels.
__global__ void __launch_bounds__(2 * kChannels) pool_online_kernel(Job job) {
  pool_online(job, blockIdx.x, channel_of_thread(), threadIdx.x >= kChannels, wait_for_previous);
}

__global__ void __launch_bounds__(kChannels) pool_overlap_kernel(Job job) {
  pool_overlap(job, blockIdx.x, channel_of_thread(), wait_for_previous);
}

}  // namespace

void compressor_pool(const ops::CompressorPool::Desc& desc, const ops::CompressorPool::Args& args,
                     device::Queue& queue) {
  const Job job = job_of(desc, args);
  const dim3 grid(static_cast<unsigned>(args.entries.shape[0]),
                  static_cast<unsigned>(ceil_div<int64_t>(desc.width, kChannels)));
  if (desc.ratio == kOverlapRatio) {
    launch("compressor_pool", queue, pool_overlap_kernel, grid, kChannels, 0, job);
  } else {
    launch("compressor_pool", queue, pool_online_kernel, grid, 2 * kChannels, 0, job);
  }
}

}  // namespace tessera::backends::cuda
