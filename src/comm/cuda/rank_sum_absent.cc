// SPDX-License-Identifier: Apache-2.0
// Of builds without CUDA, which have no queue with a stream.
#include "base/error.h"
#include "comm/cuda/rank_sum.h"

namespace tessera::comm {

void sum_ranks_on_gpu(const void*, bool, int, int64_t, void*, bool, int64_t, void*) {
  fail(ErrorCode::kUnsupported, "this build has no CUDA");
}

}  // namespace tessera::comm
