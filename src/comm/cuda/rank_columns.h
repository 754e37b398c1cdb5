// SPDX-License-Identifier: Apache-2.0
#pragma once
// join_columns() of a GPU; `stream` is a cudaStream_t.
#include <cstdint>

namespace tessera::comm {

// out [rows, world, columns] = parts [world, rows, columns], words of 4 bytes.
void join_columns_on_gpu(const void* parts, int64_t world, int64_t rows, int64_t columns, void* out, void* stream);

}  // namespace tessera::comm
