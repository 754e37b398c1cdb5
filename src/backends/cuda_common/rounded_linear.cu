// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda_common/rounded_linear.h"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda_common {

namespace {

constexpr int kThreads = 256;

struct Job {
  const float *sums, *factors;
  Values y;
  int64_t out;
};

// Grid: rows of a token and group by parts of their outputs.
__global__ void __launch_bounds__(kThreads) scale_rows(Job job) {
  wait_for_previous();
  const int64_t row = blockIdx.x, i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (i < job.out) job.y.store(row * job.out + i, job.sums[row * job.out + i] * job.factors[row]);
}

}  // namespace

void scale_outputs(const ops::Linear::Desc& desc, int64_t num_tokens, const float* sums, const float* factors,
                   const TensorView& y, const device::Queue& queue) {
  const Job job{sums, factors, values_of(y), desc.out};
  const dim3 grid(static_cast<unsigned>(num_tokens * desc.groups),
                  static_cast<unsigned>(ceil_div<int64_t>(desc.out, kThreads)));
  launch("scale_outputs", queue, scale_rows, grid, kThreads, 0, job);
}

}  // namespace tessera::backends::cuda_common
