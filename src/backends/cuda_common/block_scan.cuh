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
// The sum of the values of the lanes of a warp up to this one.
template <class T>
__device__ T sum_up_to(T value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}
template <class T>
__device__ ScanResult<T> sum_before(T value) {
  constexpr int kMaxWarps = 32;
  __shared__ T s_warps[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const T sum = sum_up_to(value);
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  const T sums = sum_up_to(lane < num_warps ? s_warps[lane] : T{0});
  const T lower = __shfl_sync(~0u, sums, max(warp - 1, 0));
  return {sum - value + (warp == 0 ? T{0} : lower), __shfl_sync(~0u, sums, num_warps - 1)};
}

}  // namespace tessera::backends::cuda_common
