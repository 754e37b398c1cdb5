// SPDX-License-Identifier: Apache-2.0
// The sum over ranks. Bound by reading world * count elements; a thread has one element, so that the order of additions
// is that of ranks wherever it lies.
#include "comm/cuda/rank_sum.h"

#include "comm/rank_sum.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const void* parts, bool in_bf16, int world, int64_t stride, void* out, bool out_bf16, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  store_value(out, out_bf16, i, sum_in_order(world, [&](int r) { return load_value(parts, in_bf16, r * stride + i); }));
}

}  // namespace

void sum_ranks_on_gpu(const void* parts, bool in_bf16, int world, int64_t stride, void* out, bool out_bf16,
                      int64_t count, void* stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, sum_kernel, parts, in_bf16, world, stride, out, out_bf16, count));
}

}  // namespace tessera::comm
