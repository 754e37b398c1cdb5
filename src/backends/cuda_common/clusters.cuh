// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many clusters of thread blocks are at work at once.
#include "device/cuda/check.h"

namespace tessera::backends::cuda_common {

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
