// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starting a kernel on a queue.
#include <cstdint>

#include "base/integer_math.h"
#include "device/cuda/check.h"
#include "device/queue.h"

namespace tessera::backends::cuda_common {

// wait_for_previous() in two steps, for a kernel whose first loads would be behind what the next one copies before its
// own wait.
__device__ inline void wait_alone() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// What every kernel does before it reads or writes anything but weights and what the host copied for the step
// (positions, slots, places, counts, slices; a table of pages may be a kernel's). Its blocks may be in place before the
// kernel before it in the queue has ended (launch() asks for that, which hides a launch's latency); here they wait
// until that has ended and its results are there, and let the next kernel's blocks take place. So whoever makes weights
// with a kernel sees to it that something else than a kernel follows (a copy, a wait), and at most one kernel waits
// while one works. Nor does what the kernel before the last one made have to be waited for, since the last one's blocks
// have: who counts on that says what comes between (experts' ids; x of ops/all_experts).
__device__ inline void wait_for_previous() {
  wait_alone();
  let_next_begin();
}

// Dynamic shared memory that a launch need not ask for: with what kernels declare themselves it is less than 48 KiB.
constexpr size_t kSharedForAll = 16 << 10;

// An empty grid is a no-op. `name` is what an error says; an error inside the kernel surfaces in a later call.
// In clusters of `cluster` blocks along x, which divides grid.x.
template <class... Parameters, class... Arguments>
void launch_clusters(const char* name, const device::Queue& queue, void (*kernel)(Parameters...), dim3 grid,
                     unsigned block, size_t shared_bytes, unsigned cluster, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  if (shared_bytes > kSharedForAll) {
    TESSERA_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (cluster > 1) {
    cudaLaunchAttribute& size = attributes[num_attributes++];
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = cluster, size.val.clusterDim.y = size.val.clusterDim.z = 1;
  }
  if (queue.overlaps_kernels()) {
    cudaLaunchAttribute& overlap = attributes[num_attributes++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(queue.stream());
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  device::cuda::check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name, __FILE__, __LINE__);
}

// The same without clusters.
template <class... Parameters, class... Arguments>
void launch(const char* name, const device::Queue& queue, void (*kernel)(Parameters...), dim3 grid, unsigned block,
            size_t shared_bytes, Arguments... arguments) {
  launch_clusters(name, queue, kernel, grid, block, shared_bytes, 1, arguments...);
}

// Of the current GPU.
inline int gpu_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  TESSERA_CUDA_CHECK(cudaGetDevice(&device));
  TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int multiprocessors() {
  return gpu_attribute(cudaDevAttrMultiProcessorCount);
}
// What a block may ask for, of kernels that declare none themselves.
inline size_t most_shared_bytes() {
  return static_cast<size_t>(gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// The launch's dynamic shared memory, aligned to 16 bytes.
template <class T>
__device__ T* dynamic_shared() {
#ifdef TESSERA_CUDA_EMULATED
  return static_cast<T*>(device::emulated::dynamic_shared());
#else
  extern __shared__ __align__(16) unsigned char s_dynamic[];
  return reinterpret_cast<T*>(s_dynamic);
#endif
}

// The same, aligned to 1,024 bytes, as 128-byte swizzles want it.
template <class T>
__device__ T* swizzled_shared() {
#ifdef TESSERA_CUDA_EMULATED
  return static_cast<T*>(device::emulated::dynamic_shared());
#else
  extern __shared__ __align__(1024) unsigned char s_swizzled[];
  return reinterpret_cast<T*>(s_swizzled);
#endif
}

// Blocks of `block` threads that cover `count` items.
inline dim3 grid_for(int64_t count, int64_t block) {
  return dim3(static_cast<unsigned>(ceil_div(count, block)));
}

// The item of this thread in such a grid.
__device__ inline int64_t item_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace tessera::backends::cuda_common
