// SPDX-License-Identifier: Apache-2.0
// linear: half a warp per weight row and tile of tokens.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kRowsPerBlock = 8;

struct Job {
  Values x;              // [tokens, groups * in]
  const float* factors;  // [tokens, groups]; null: 1
  const void *data, *scales;
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
};

template <ops::WeightFormat kFormat>
__global__ void linear_kernel(Job job) {
  wait_for_previous();
  const int64_t num_rows = job.groups * job.out, at = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokenTile;
  const int64_t row = at < num_rows ? at : num_rows - 1;  // the other half of a warp needs this one
  const int64_t group = row / job.out;
  const int count = static_cast<int>(min(job.num_tokens - first, int64_t{kTokenTile}));
  int64_t offsets[kTokenTile];
#pragma unroll
  for (int t = 0; t < kTokenTile; ++t) offsets[t] = ((first + t) * job.groups + group) * job.in;
  float sums[kTokenTile];
  dot_tile(WeightRow<kFormat>(job.data, job.scales, job.in, row), job.x, offsets, count, job.in, sums);
  if (at >= num_rows || threadIdx.x % kLanes != 0) return;
#pragma unroll
  for (int t = 0; t < kTokenTile; ++t) {
    if (t >= count) break;
    const float factor = job.factors == nullptr ? 1.0f : job.factors[(first + t) * job.groups + group];
    job.y.store((first + t) * num_rows + row, sums[t] * (factor * job.tensor_scale));
  }
}

}  // namespace

int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens) {
  return needs_input_rows(desc.input) ? max_tokens * desc.groups * (desc.in + 1) * static_cast<int64_t>(sizeof(float))
                                      : 0;
}

void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  Job job{values_of(args.x),
          nullptr,
          args.weight.data,
          args.weight.block_scales,
          args.weight.tensor_scale,
          values_of(args.y),
          desc.in,
          desc.out,
          desc.groups,
          args.num_tokens};
  if (needs_input_rows(desc.input)) {
    const int64_t num_rows = args.num_tokens * desc.groups;
    float* rows = static_cast<float*>(args.workspace);
    float* factors = rows + num_rows * desc.in;
    prepare_input_rows(desc.input, args.x, num_rows, desc.in, nullptr, {rows, DType::kF32, args.x.shape}, factors,
                       queue);
    job.x = {rows, false};
    job.factors = factors;
  }
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(desc.groups * desc.out, kRowsPerBlock)),
                  static_cast<unsigned>(ceil_div<int64_t>(args.num_tokens, kTokenTile)));
  with_format(desc.format, [&](auto format) {
    launch("linear", queue, linear_kernel<format.value>, grid, kRowsPerBlock * kLanes, 0, job);
  });
}

}  // namespace tessera::backends::cuda
