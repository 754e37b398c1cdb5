// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many clusters of thread blocks are at work at once.
#include <array>
#include <atomic>
#include <cstddef>

#include "device/cuda/check.h"

namespace tessera::backends::cuda_common {

// A number that each GPU has of its own and keeps, asked for once where GPUs are few: the same whoever asks first.
class NumberOfGpu {
 public:
  // That of the current GPU; ask() says it.
  template <class Ask>
  int get(const Ask& ask) {
    int device = 0;
    TESSERA_CUDA_CHECK(cudaGetDevice(&device));
    if (static_cast<size_t>(device) >= known_.size()) return ask();
    std::atomic<int>& known = known_[static_cast<size_t>(device)];
    int number = known.load(std::memory_order_relaxed) - 1;
    if (number < 0) known.store((number = ask()) + 1, std::memory_order_relaxed);
    return number;
  }

 private:
  std::array<std::atomic<int>, 64> known_{};  // one more than the number; 0: nobody has asked
};

// Clusters of `cluster` blocks that the GPU has a place for at once: of more than two perhaps on fewer
// multiprocessors than it has, since all blocks of a cluster lie in one part of the GPU.
template <class... Parameters>
int clusters_at_once(void (*kernel)(Parameters...), unsigned block, size_t shared_bytes, unsigned cluster) {
  TESSERA_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim.x = cluster, size.val.clusterDim.y = size.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &size;
  config.numAttrs = 1;
  int count = 0;
  TESSERA_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  return count;
}
}  // namespace tessera::backends::cuda_common
