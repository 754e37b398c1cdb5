// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the blocks of a small grid go. Where a kernel's blocks take their places while the one before ends, the first
// multiprocessor that is free can get as many as it has room for, while others stay idle. Whose blocks gain from a
// multiprocessor of their own asks for so much shared memory that two have no room (docs/performance/hopper.md, "Where
// the blocks of a small grid go").
#include <algorithm>

#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda_common {

// Dynamic shared memory to ask for where `blocks` want `shared_bytes` each: half of what a block may have, which with
// the KiB that the system takes for each is more than half of a multiprocessor's, where each can have one to itself.
inline size_t spread_bytes(const device::Queue& queue, size_t shared_bytes, int64_t blocks) {
  if (!queue.overlaps_kernels() || blocks < 2 || blocks > multiprocessors()) return shared_bytes;
  return std::max(shared_bytes, most_shared_bytes() / 2);
}

}  // namespace tessera::backends::cuda_common
