// SPDX-License-Identifier: Apache-2.0
// Parts of pages on other GPUs, copied here. Bound by the link: a thread has several words on their way at once.
#include <algorithm>

#include "comm/cuda/near_pages.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kThreads = 256, kWords = 4;  // of a thread at once

// A block has one page (x) of one sequence (y).
__global__ void __launch_bounds__(kThreads) near_pages_kernel(const __grid_constant__ NearCall call) {
  const NearSequence sequence = call.sequences[blockIdx.y];
  const auto page = static_cast<int64_t>(blockIdx.x);
  if (page >= sequence.num_pages) return;
  const int64_t at = sequence.place * call.pages.stride + page;
  const uint8_t* part = call.pages.pages[at] + call.pages.offset;
  if (sequence.first < 0) {
    if (threadIdx.x == 0) call.pages.table[at] = const_cast<uint8_t*>(part);
    return;
  }
  uint8_t* near = call.pages.room + (sequence.first + page) * call.pages.part_bytes;
  if (threadIdx.x == 0) call.pages.table[at] = near;
  const auto* from = reinterpret_cast<const uint4*>(part);
  auto* to = reinterpret_cast<uint4*>(near);
  const int64_t count = call.pages.part_bytes / kNearBytes;
  for (int64_t first = threadIdx.x; first < count; first += kThreads * kWords) {
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (const int64_t word = first + i * kThreads; word < count) words[i] = from[word];
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (const int64_t word = first + i * kThreads; word < count) to[word] = words[i];
    }
  }
}

}  // namespace

void bring_near_on_gpu(const NearCall& call, void* stream) {
  int32_t most = 0;
  for (int i = 0; i < call.count; ++i) most = std::max(most, call.sequences[i].num_pages);
  if (most == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(most), static_cast<unsigned>(call.count));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, near_pages_kernel, call));
}

}  // namespace tessera::comm
