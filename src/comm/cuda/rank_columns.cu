// SPDX-License-Identifier: Apache-2.0
// Columns of ranks as rows. Bound by reading and writing the matrix once; a thread copies one word, of 16 bytes where
// every row of a part begins at a multiple of that.
#include "comm/cuda/rank_columns.h"

#include <algorithm>

#include "base/integer_math.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 65'535;  // of a grid's second dimension

// A block has a piece of the columns (x) of one rank (z), of row after row (y).
template <class Word>
__global__ void __launch_bounds__(kThreads) join_kernel(const Word* parts, int64_t rows, int64_t columns, Word* out) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  const int64_t world = gridDim.z, rank = blockIdx.z;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    out[(row * world + rank) * columns + column] = parts[(rank * rows + row) * columns + column];
  }
}

template <class Word>
void launch(const void* parts, int64_t world, int64_t rows, int64_t bytes, void* out, cudaStream_t stream) {
  const int64_t columns = bytes / static_cast<int64_t>(sizeof(Word));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div<int64_t>(columns, kThreads)),
                        static_cast<unsigned>(std::min(rows, kMostBlocks)), static_cast<unsigned>(world));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, join_kernel<Word>, static_cast<const Word*>(parts), rows, columns,
                                        static_cast<Word*>(out)));
}

}  // namespace

void join_columns_on_gpu(const void* parts, int64_t world, int64_t rows, int64_t columns, void* out, void* stream) {
  const int64_t bytes = columns * static_cast<int64_t>(sizeof(uint32_t));
  const auto starts_at_16 = [](auto place) { return place % sizeof(uint4) == 0; };
  const bool is_wide = starts_at_16(reinterpret_cast<uintptr_t>(parts)) &&
                       starts_at_16(reinterpret_cast<uintptr_t>(out)) && starts_at_16(static_cast<uintptr_t>(bytes));
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_wide) return launch<uint4>(parts, world, rows, bytes, out, cuda_stream);
  launch<uint32_t>(parts, world, rows, bytes, out, cuda_stream);
}

}  // namespace tessera::comm
