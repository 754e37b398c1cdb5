// SPDX-License-Identifier: Apache-2.0
// The sum over ranks. Bound by reading world * count elements; a thread has one element or four, each of
// which it adds up in the order of ranks, wherever it lies.
#include "comm/cuda/rank_sum.h"

#include <cstdint>

#include "base/integer_math.h"
#include "comm/rank_sum.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kThreads = 256;

// N values of one type as they lie in memory, which begin at a multiple of all of them.
template <int N>
struct alignas(4 * N) Floats {
  float value[N];
  __device__ Floats& operator+=(const Floats& other) {
    for (int j = 0; j < N; ++j) value[j] += other.value[j];
    return *this;
  }
};
template <int N>
struct alignas(2 * N) Bf16s {
  uint16_t value[N];
};

template <int N>
__device__ Floats<N> load(const void* data, bool is_bf16, int64_t i) {
  if (!is_bf16) return *reinterpret_cast<const Floats<N>*>(static_cast<const float*>(data) + i);
  const Bf16s<N> found = *reinterpret_cast<const Bf16s<N>*>(static_cast<const uint16_t*>(data) + i);
  Floats<N> wide;
  for (int j = 0; j < N; ++j) wide.value[j] = load_value(found.value, true, j);
  return wide;
}

template <int N>
__device__ void store(void* data, bool is_bf16, int64_t i, const Floats<N>& sums) {
  if (!is_bf16) {
    *reinterpret_cast<Floats<N>*>(static_cast<float*>(data) + i) = sums;
    return;
  }
  Bf16s<N> rounded;
  for (int j = 0; j < N; ++j) store_value(rounded.value, true, j, sums.value[j]);
  *reinterpret_cast<Bf16s<N>*>(static_cast<uint16_t*>(data) + i) = rounded;
}

template <int N>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const void* parts, bool in_bf16, int world, int64_t stride, void* out, bool out_bf16, int64_t count) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  store(out, out_bf16, i, sum_in_order(world, [&](int r) { return load<N>(parts, in_bf16, r * stride + i); }));
}

}  // namespace

void sum_ranks_on_gpu(const void* parts, bool in_bf16, int world, int64_t stride, void* out, bool out_bf16,
                      int64_t count, void* stream) {
  // Four values begin together where all of them do: in every part, and in the result.
  constexpr int kWide = 4;
  const auto is_multiple = [&](auto value) { return value % (kWide * sizeof(float)) == 0; };
  const bool is_wide = count % kWide == 0 && stride % kWide == 0 && is_multiple(reinterpret_cast<uintptr_t>(parts)) &&
                       is_multiple(reinterpret_cast<uintptr_t>(out));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div<int64_t>(count, kThreads * (is_wide ? kWide : 1))));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, is_wide ? sum_kernel<kWide> : sum_kernel<1>, parts, in_bf16, world,
                                        stride, out, out_bf16, count));
}

}  // namespace tessera::comm
