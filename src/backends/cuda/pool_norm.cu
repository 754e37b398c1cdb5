// SPDX-License-Identifier: Apache-2.0
// pool_norm: a thread block has some channels of one entry of a compressor, or one row to norm. What bounds it is the
// latency of a launch and of a few loads behind each other, which is why all of it is one launch. Many rows, whose
// bytes and exponentials count, are the kernels of the parts.
#include <algorithm>

#include "backends/cuda/compressor_pool.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kThreads = 256;
constexpr int64_t kMostRows = 256;  // of the norm or of a compressor

struct Pool {
  pooling::Job job;
  int end, groups;  // of the pool's blocks; blocks of an entry
};

struct Job {
  Pool pools[ops::PoolNorm::kMostPools];
  Values x, weight, out;  // of the norm, whose rows have the blocks behind those of the pools
  int64_t width;
  float eps;
};

// Channels that a block has of an entry; where windows do not overlap half of the threads have what a slice leaves
// open.
constexpr int channels_of(int64_t ratio) {
  return ratio == pooling::kOverlapRatio ? kThreads : kThreads / 2;
}

__device__ void pool(const pooling::Job& job, int64_t entry, int group) {
  const int thread = static_cast<int>(threadIdx.x);
  if (job.ratio == pooling::kOverlapRatio) {
    pooling::pool_overlap(job, entry, int64_t{group} * kThreads + thread, wait_for_previous);
  } else {
    constexpr int kChannels = kThreads / 2;
    pooling::pool_online(job, entry, int64_t{group} * kChannels + thread % kChannels, thread >= kChannels,
                         wait_for_previous);
  }
}

__global__ void __launch_bounds__(kThreads) pool_norm_kernel(const __grid_constant__ Job job) {
  int block = static_cast<int>(blockIdx.x);
  int begin = 0;
  for (const Pool& of : job.pools) {
    if (block < of.end) return pool(of.job, (block - begin) / of.groups, (block - begin) % of.groups);
    begin = of.end;
  }
  norm_stored_row(dynamic_shared<float>(), job.x, job.weight, job.out, (block - begin) * job.width, job.width, job.eps,
                  wait_for_previous);
}

}  // namespace

bool pool_norm_supports(const ops::PoolNorm::Desc& desc, std::string& why_not) {
  return ops::pool_norm_reference_supports(desc, why_not) && (!desc.norm || rms_norm_supports(*desc.norm, why_not));
}

void pool_norm(const ops::PoolNorm::Desc& desc, const ops::PoolNorm::Args& args, device::Queue& queue) {
  const int64_t num_norms = desc.norm ? args.norm.num_rows : 0;
  int64_t most_rows = num_norms;
  for (size_t i = 0; i < desc.pools.size(); ++i) most_rows = std::max(most_rows, args.pools[i].entries.shape[0]);
  if (most_rows > kMostRows) {
    for (size_t i = 0; i < desc.pools.size(); ++i) compressor_pool(desc.pools[i], args.pools[i], queue);
    if (desc.norm) rms_norm(*desc.norm, args.norm, queue);
    return;
  }
  Job job{};
  int64_t end = 0;
  for (size_t i = 0; i < ops::PoolNorm::kMostPools; ++i) {
    Pool& of = job.pools[i];
    if (i < desc.pools.size()) {
      const int64_t groups = ceil_div<int64_t>(desc.pools[i].width, channels_of(desc.pools[i].ratio));
      of.job = pooling::job_of(desc.pools[i], args.pools[i]), of.groups = static_cast<int>(groups);
      end += args.pools[i].entries.shape[0] * groups;
    }
    of.end = static_cast<int>(end);
  }
  size_t shared_bytes = 0;
  if (desc.norm) {
    job.x = values_of(args.norm.x), job.weight = values_of(args.norm.weight), job.out = values_of(args.norm.out);
    job.width = desc.norm->width, job.eps = desc.norm->eps;
    shared_bytes = static_cast<size_t>(job.width) * sizeof(float);
  }
  launch("pool_norm", queue, pool_norm_kernel, grid_for(end + num_norms, 1), kThreads, shared_bytes, job);
}

}  // namespace tessera::backends::cuda
