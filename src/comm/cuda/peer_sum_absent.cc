// SPDX-License-Identifier: Apache-2.0
// Of builds without CUDA.
#include "base/error.h"
#include "comm/cuda/peer_sum.h"

namespace tessera::comm {

void peer_sum_on_gpu(const device::PeerView&, PeerWay, const void*, bool, void*, bool, int64_t, const device::Queue&,
                     PeerPart) {
  fail(ErrorCode::kUnsupported, "this build has no CUDA");
}

}  // namespace tessera::comm
