// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sum that every communicator computes: ranks in ascending order in FP32, one rounding.
#include <cstdint>

#include "device/queue.h"
#include "numeric/bf16.h"
#include "tensor/dtype.h"

namespace tessera::comm {

TESSERA_HOST_DEVICE inline float load_value(const void* data, bool is_bf16, int64_t i) {
  return is_bf16 ? numeric::bf16_to_float(static_cast<const uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
}

TESSERA_HOST_DEVICE inline void store_value(void* data, bool is_bf16, int64_t i, float value) {
  if (is_bf16) {
    static_cast<uint16_t*>(data)[i] = numeric::bf16_from_float(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

// value_of(0) + value_of(1) + ...: the order and the type in which every communicator adds up. Values are floats, or
// several that are added one by one.
template <class ValueOf>
TESSERA_HOST_DEVICE auto sum_in_order(int world, const ValueOf& value_of) {
  auto sum = value_of(0);
  for (int r = 1; r < world; ++r) sum += value_of(r);
  return sum;
}

// out[i] = parts[0][i] + parts[1][i] + ... for i < count, where part r begins r * stride elements behind `parts`. Both
// types F32 or BF16. On the queue's GPU, or on the calling thread.
void sum_ranks(const void* parts, DType in, int world, int64_t stride, void* out, DType out_type, int64_t count,
               device::Queue& queue);

}  // namespace tessera::comm
