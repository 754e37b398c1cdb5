// SPDX-License-Identifier: Apache-2.0
#pragma once
// sum_ranks() of a GPU; `stream` is a cudaStream_t.
#include <cstdint>

namespace tessera::comm {

void sum_ranks_on_gpu(const void* parts, bool in_bf16, int world, int64_t stride, void* out, bool out_bf16,
                      int64_t count, void* stream);

}  // namespace tessera::comm
