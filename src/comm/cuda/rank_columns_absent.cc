// SPDX-License-Identifier: Apache-2.0
// Of builds without CUDA, which have no queue with a stream.
#include "base/error.h"
#include "comm/cuda/rank_columns.h"

namespace tessera::comm {

void swap_rows_on_gpu(const void*, int64_t, int64_t, int64_t, void*, void*) {
  fail(ErrorCode::kUnsupported, "this build has no CUDA");
}

}  // namespace tessera::comm
