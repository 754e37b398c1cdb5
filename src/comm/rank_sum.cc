// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_sum.h"

#include "base/error.h"
#include "comm/cuda/rank_sum.h"

namespace tessera::comm {

void sum_ranks(const void* parts, DType in, int world, int64_t stride, void* out, DType out_type, int64_t count,
               device::Queue& queue) {
  if (queue.stream() != nullptr) {
    sum_ranks_on_gpu(parts, in == DType::kBF16, world, stride, out, out_type == DType::kBF16, count, queue.stream());
    return;
  }
  const bool in_bf16 = in == DType::kBF16, out_bf16 = out_type == DType::kBF16;
  for (int64_t i = 0; i < count; ++i) {
    store_value(out, out_bf16, i,
                sum_in_order(world, [&](int r) { return load_value(parts, in_bf16, r * stride + i); }));
  }
}

}  // namespace tessera::comm
