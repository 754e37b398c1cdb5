// SPDX-License-Identifier: Apache-2.0
#pragma once
// BF16 values as they travel between GPUs (device/cuda/peer_exchange.cuh): four of a row to a slot.
#include <cstdint>

#include "backends/cuda_common/streams.cuh"
#include "device/cuda/peer_exchange.cuh"

namespace tessera::backends::cuda_common {

constexpr int kPeerValues = 4;

__device__ inline uint64_t slot_words(const Pack<kPeerValues>& values) {
  const auto word = [&](int n) {
    return uint32_t{numeric::bf16_from_float(values.v[n + 1])} << 16 | numeric::bf16_from_float(values.v[n]);
  };
  return device::cuda::peer_words(word(0), word(2));
}

__device__ inline Pack<kPeerValues> slot_values(uint64_t words) {
  Pack<kPeerValues> values;
#pragma unroll
  for (int n = 0; n < kPeerValues; ++n) {
    values.v[n] = numeric::bf16_to_float(static_cast<uint16_t>(words >> 16 * n));
  }
  return values;
}

}  // namespace tessera::backends::cuda_common
