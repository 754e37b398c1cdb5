// SPDX-License-Identifier: Apache-2.0
#include "ops/reference_rows.h"

#include <cstring>

#include "base/error.h"
#include "numeric/bf16.h"

namespace tessera::ops {

namespace {

constexpr int kLanes = 16;

float add_lanes(float* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace

void load_floats(const TensorView& tensor, int64_t offset, int64_t count, float* out) {
  if (count == 0) return;  // an empty tensor may have no address at all
  if (tensor.dtype == DType::kF32) {
    std::memcpy(out, tensor.as<float>() + offset, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  TESSERA_CHECK(tensor.dtype == DType::kBF16, std::string(dtype_name(tensor.dtype)));
  const uint16_t* source = tensor.as<uint16_t>() + offset;
  for (int64_t i = 0; i < count; ++i) out[i] = numeric::bf16_to_float(source[i]);
}

void store_floats(const TensorView& tensor, int64_t offset, int64_t count, const float* values) {
  if (count == 0) return;  // an empty tensor may have no address at all
  if (tensor.dtype == DType::kF32) {
    std::memcpy(tensor.as<float>() + offset, values, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  TESSERA_CHECK(tensor.dtype == DType::kBF16, std::string(dtype_name(tensor.dtype)));
  uint16_t* target = tensor.as<uint16_t>() + offset;
  for (int64_t i = 0; i < count; ++i) target[i] = numeric::bf16_from_float(values[i]);
}

float round_to(DType dtype, float value) {
  return dtype == DType::kBF16 ? numeric::bf16_round(value) : value;
}

float dot(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += a[k + i] * b[k + i];
  }
  for (int i = 0; k < count; ++k, ++i) lanes[i] += a[k] * b[k];
  return add_lanes(lanes);
}

float sum_of_squares(const float* x, int64_t count) {
  return dot(x, x, count);
}

}  // namespace tessera::ops
