// SPDX-License-Identifier: Apache-2.0
#pragma once
// join_columns() and split_columns() of a GPU; `stream` is a cudaStream_t.
#include <cstdint>

namespace tessera::comm {

// out [inner, outer, words] = in [outer, inner, words], words of 4 bytes.
void swap_rows_on_gpu(const void* in, int64_t outer, int64_t inner, int64_t words, void* out, void* stream);

}  // namespace tessera::comm
