// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starting a kernel on a queue.
#include <cstdint>

#include "base/integer_math.h"
#include "device/cuda/check.h"
#include "device/queue.h"

namespace tessera::backends::cuda_common {

// An empty grid is a no-op. `name` is what an error says; an error inside the kernel surfaces in a later call.
template <class... Parameters, class... Arguments>
void launch(const char* name, const device::Queue& queue, void (*kernel)(Parameters...), dim3 grid, unsigned block,
            size_t shared_bytes, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(queue.stream())>>>(arguments...);
  device::cuda::check(cudaGetLastError(), name, __FILE__, __LINE__);
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
