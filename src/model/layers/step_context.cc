// SPDX-License-Identifier: Apache-2.0
#include "model/layers/step_context.h"

#include "base/error.h"

namespace tessera::model {

void StepContext::show(const std::string& name, const TensorView& value) const {
  if (!tracer->looks()) return;
  if (arena.memory().is_host()) return tracer->tensor(name, value);
  const device::Tensor copy(value.dtype, value.shape);
  arena.memory().download(copy.view().data, value.data, static_cast<size_t>(value.num_bytes()));
  tracer->tensor(name, copy);
}

TensorView rows_of(const TensorView& view, int64_t begin, int64_t count) {
  std::array<int64_t, kMaxRank> dims{};
  for (int i = 0; i < view.shape.rank(); ++i) dims[static_cast<size_t>(i)] = view.shape[i];
  TESSERA_CHECK(view.shape.rank() > 0 && begin >= 0 && begin + count <= dims[0], view.shape.to_string());
  const int64_t row_bytes = dims[0] == 0 ? 0 : view.num_bytes() / dims[0];
  dims[0] = count;
  return {view.as<char>() + begin * row_bytes, view.dtype,
          Shape(std::span<const int64_t>(dims.data(), static_cast<size_t>(view.shape.rank())))};
}

TensorView reshape(const TensorView& view, const Shape& shape) {
  TESSERA_CHECK(shape.num_elements() == view.shape.num_elements(), view.shape.to_string() + " as " + shape.to_string());
  return {view.data, view.dtype, shape};
}

}  // namespace tessera::model
