// SPDX-License-Identifier: Apache-2.0
// quantize_nvfp4: a thread per block of 16 values. Activations: a thread block per row, which finds the row's largest
// magnitude first. Weights: the largest magnitude of all by an atomic maximum, whose order changes nothing, then the
// blocks.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using Rule = ops::QuantizeNvfp4::Rule;
using numeric::kNvfp4Block;

constexpr int kBlock = 128;
constexpr int64_t kMostBlocks = 4096;  // that look for a weight's largest magnitude

struct Job {
  Values x;
  int64_t width, count;  // values of a row, and of all
  uint8_t *codes, *scales;
  float* globals;
  Rule rule;
};

// Block `block` of all, counted through the rows.
__device__ void quantize_block(const Job& job, int64_t block, float global) {
  float values[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; ++i) values[i] = job.x[block * kNvfp4Block + i];
  ops::quantize_values(job.rule, values, kNvfp4Block, global, job.codes + block * (kNvfp4Block / 2),
                       job.scales + block);
}

__global__ void __launch_bounds__(kBlock) quantize_rows(Job job) {
  wait_for_previous();
  const int64_t row = blockIdx.x, num_blocks = job.width / kNvfp4Block;
  const float global = ops::global_scale(job.rule, block_amax<kBlock>(job.x, row * job.width, job.width));
  for (int64_t i = threadIdx.x; i < num_blocks; i += kBlock) quantize_block(job, row * num_blocks + i, global);
  if (threadIdx.x == 0) job.globals[row] = global;
}

// globals[0] holds the bits of the largest magnitude so far; those of NaN are the largest.
__global__ void begin_amax(Job job) {
  wait_for_previous();
  job.globals[0] = 0;
}
__global__ void __launch_bounds__(kBlock) find_amax(Job job) {
  wait_for_previous();
  const int64_t share = ceil_div<int64_t>(job.count, gridDim.x), begin = blockIdx.x * share;
  const int64_t count = min(share, job.count - begin);
  if (count <= 0) return;  // the whole thread block
  const float amax = block_amax<kBlock>(job.x, begin, count);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned int*>(job.globals), __float_as_uint(amax) & 0x7FFFFFFF);
}
__global__ void finish_amax(Job job) {
  wait_for_previous();
  job.globals[0] = ops::global_scale(job.rule, job.globals[0]);
}
__global__ void __launch_bounds__(kBlock) quantize_weight(Job job) {
  wait_for_previous();
  const int64_t block = item_index();
  if (block < job.count / kNvfp4Block) quantize_block(job, block, job.globals[0]);
}

}  // namespace

void quantize_nvfp4(const ops::QuantizeNvfp4::Desc& desc, const ops::QuantizeNvfp4::Args& args, device::Queue& queue) {
  const int64_t num_rows = args.x.shape[0], width = args.x.shape[1], count = num_rows * width;
  if (count == 0) return;
  const Job job{values_of(args.x), width, count, args.codes, args.scales, args.globals, desc.rule};
  if (desc.rule == Rule::kRows) {
    launch("quantize_nvfp4", queue, quantize_rows, grid_for(num_rows, 1), kBlock, 0, job);
    return;
  }
  const dim3 blocks = grid_for(count / kNvfp4Block, kBlock);
  launch("quantize_nvfp4", queue, begin_amax, dim3(1), 1, 0, job);
  launch("quantize_nvfp4", queue, find_amax, grid_for(std::min<int64_t>(blocks.x, kMostBlocks), 1), kBlock, 0, job);
  launch("quantize_nvfp4", queue, finish_amax, dim3(1), 1, 0, job);
  launch("quantize_nvfp4", queue, quantize_weight, blocks, kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
