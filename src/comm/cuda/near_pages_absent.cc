// SPDX-License-Identifier: Apache-2.0
// Of builds without CUDA, which have no queue with a stream.
#include "base/error.h"
#include "comm/cuda/near_pages.h"

namespace tessera::comm {

void bring_near_on_gpu(const NearCall&, void*) {
  fail(ErrorCode::kUnsupported, "this build has no CUDA");
}

}  // namespace tessera::comm
