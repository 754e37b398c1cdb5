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

// A block has a piece of the columns (x) of one row after another (y).
template <class Word>
__global__ void __launch_bounds__(kThreads)
    swap_kernel(const Word* in, unsigned outer, unsigned inner, int64_t columns, Word* out) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  for (unsigned row = blockIdx.y; row < outer * inner; row += gridDim.y) {
    const int64_t to = static_cast<int64_t>(row % inner) * outer + row / inner;
    out[to * columns + column] = in[row * columns + column];
  }
}

template <class Word>
void launch(const void* in, int64_t outer, int64_t inner, int64_t bytes, void* out, cudaStream_t stream) {
  const int64_t columns = bytes / static_cast<int64_t>(sizeof(Word));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div<int64_t>(columns, kThreads)),
                        static_cast<unsigned>(std::min(outer * inner, kMostBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, swap_kernel<Word>, static_cast<const Word*>(in),
                                        static_cast<unsigned>(outer), static_cast<unsigned>(inner), columns,
                                        static_cast<Word*>(out)));
}

}  // namespace

void swap_rows_on_gpu(const void* in, int64_t outer, int64_t inner, int64_t words, void* out, void* stream) {
  const int64_t bytes = words * static_cast<int64_t>(sizeof(uint32_t));
  const auto starts_at_16 = [](auto place) { return place % sizeof(uint4) == 0; };
  const bool is_wide = starts_at_16(reinterpret_cast<uintptr_t>(in)) &&
                       starts_at_16(reinterpret_cast<uintptr_t>(out)) && starts_at_16(static_cast<uintptr_t>(bytes));
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_wide) return launch<uint4>(in, outer, inner, bytes, out, cuda_stream);
  launch<uint32_t>(in, outer, inner, bytes, out, cuda_stream);
}

}  // namespace tessera::comm
