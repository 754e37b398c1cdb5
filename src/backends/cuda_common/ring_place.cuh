// SPDX-License-Identifier: Apache-2.0
#pragma once
// A place in a ring of stages in shared memory, and the parity of its barriers' phase (ptx/bulk_copy.cuh).

namespace tessera::backends::cuda_common {

template <int kStages>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace tessera::backends::cuda_common
