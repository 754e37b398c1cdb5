// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_columns.h"

#include <fmt/format.h>

#include <cstring>

#include "base/error.h"
#include "comm/cuda/rank_columns.h"

namespace tessera::comm {

namespace {

void check_views(const TensorView& parts, const TensorView& out) {
  const Shape &from = parts.shape, &to = out.shape;
  const bool are_floats = parts.dtype == DType::kF32 && out.dtype == DType::kF32;
  if (are_floats && from.rank() == 3 && to == Shape{from[1], from[0] * from[2]}) return;
  const auto described = [](const TensorView& view) {
    return fmt::format("{} {}", dtype_name(view.dtype), view.shape.to_string());
  };
  fail(ErrorCode::kInvalidArgument,
       fmt::format("join_columns: expected F32 [world, rows, columns] into [rows, world * columns], found {} into {}",
                   described(parts), described(out)));
}

}  // namespace

void join_columns(const TensorView& parts, const TensorView& out, device::Queue& queue) {
  check_views(parts, out);
  const int64_t world = parts.shape[0], rows = parts.shape[1], columns = parts.shape[2];
  if (out.shape.num_elements() == 0) return;
  if (queue.stream() != nullptr) return join_columns_on_gpu(parts.data, world, rows, columns, out.data, queue.stream());
  for (int64_t rank = 0; rank < world; ++rank) {
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(out.as<float>() + (row * world + rank) * columns, parts.as<float>() + (rank * rows + row) * columns,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }
}

}  // namespace tessera::comm
