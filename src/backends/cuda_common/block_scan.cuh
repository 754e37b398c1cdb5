// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums over the threads of a block.

namespace tessera::backends::cuda_common {

// The sum of the values of the threads before this one, and of all of them. Whole numbers; all threads take part, and
// their number is a multiple of 32.
template <class T>
struct ScanResult {
  T before, total;
};
template <class T>
__device__ ScanResult<T> sum_before(T value) {
  constexpr int kMaxWarps = 32;
  __shared__ T s_warps[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  T sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += lower;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  ScanResult<T> result{sum - value, 0};
  for (int w = 0; w < num_warps; ++w) {
    if (w < warp) result.before += s_warps[w];
    result.total += s_warps[w];
  }
  return result;
}

}  // namespace tessera::backends::cuda_common
