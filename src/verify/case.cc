// SPDX-License-Identifier: Apache-2.0
#include "verify/case.h"

#include <algorithm>
#include <cmath>

#include "verify/fills.h"

namespace tessera::verify {

std::vector<float> filled(Rng& rng, Fill fill, int64_t rows, int64_t cols) {
  if (fill == Fill::kMixed) return adversarial(rng, rows, cols);
  std::vector<float> x = normal_values(rng, rows, cols);
  for (float& value : x) {
    if (fill == Fill::kZero) value = std::copysign(0.0f, value);
    if (fill == Fill::kDenormal) value = std::ldexp(value, -130);
  }
  return x;
}

void* Arrays::bytes(const void* values, size_t count) {
  device::Buffer& buffer = buffers_.emplace_back(std::max<size_t>(count, 1));
  if (count > 0) std::memcpy(buffer.data(), values, count);
  return buffer.data();
}

TensorView Arrays::tensor(const std::vector<float>& values, DType dtype, const Shape& shape) {
  const device::Tensor rounded = as_tensor(values, dtype, shape);
  TensorView view = rounded.view();
  view.data = bytes(rounded.view().data, static_cast<size_t>(view.num_bytes()));
  return view;
}

ops::WeightView Arrays::weight(Rng& rng, ops::WeightFormat format, int64_t rows, int64_t cols) {
  RandomWeight weight = random_weight(rng, format, rows, cols);
  buffers_.push_back(std::move(weight.data));
  buffers_.push_back(std::move(weight.scales));
  return weight.view;
}

uint8_t* Arrays::entries(Rng& rng, Fill fill, const ops::EntryLayout& layout, int64_t count) {
  const std::vector<float> values = filled(rng, fill, count, layout.width);
  std::vector<uint8_t> encoded(static_cast<size_t>(count * layout.entry_bytes()));
  for (int64_t i = 0; i < count; ++i) {
    ops::encode_entry(layout, values.data() + i * layout.width, encoded.data() + i * layout.entry_bytes());
  }
  return array(encoded);
}

TensorView Arrays::output(const char* name, DType dtype, const Shape& shape, Rule rule, double bound) {
  TensorView view{nullptr, dtype, shape};
  const std::vector<uint8_t> poison(static_cast<size_t>(view.num_bytes()), 0xFF);  // a NaN in FP32 and BF16
  view.data = array(poison);
  updates(name, view, rule, bound);
  return view;
}

void Arrays::updates(const char* name, const TensorView& view, Rule rule, double bound) {
  if (rule != Rule::kBits && bound == 0) bound = view.dtype == DType::kF32 ? kF32Bound : kBf16Bound;
  const auto* begin = view.as<unsigned char>();
  outputs_.push_back({name, view, rule, bound, true, {begin, begin + view.num_bytes()}});
}

void Arrays::clobbers(const char* name, const TensorView& view) {
  updates(name, view, Rule::kBits);
  outputs_.back().is_compared = false;
}

}  // namespace tessera::verify
