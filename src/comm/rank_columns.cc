// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_columns.h"

#include <fmt/format.h>

#include <cstring>

#include "base/error.h"
#include "comm/cuda/rank_columns.h"

namespace tessera::comm {

namespace {

[[noreturn]] void fail_views(const char* name, const char* expected, const TensorView& in, const TensorView& out) {
  const auto described = [](const TensorView& view) {
    return fmt::format("{} {}", dtype_name(view.dtype), view.shape.to_string());
  };
  fail(ErrorCode::kInvalidArgument,
       fmt::format("{}: expected {}, found {} into {}", name, expected, described(in), described(out)));
}

bool are_alike(const TensorView& parts, const TensorView& joined) {
  const Shape& of = parts.shape;
  return parts.dtype == joined.dtype && of.rank() == 3 && joined.shape == Shape{of[1], of[0] * of[2]};
}

// out [inner, outer, words] = in [outer, inner, words], words of 4 bytes.
void swap_rows(const void* in, int64_t outer, int64_t inner, int64_t words, void* out, device::Queue& queue) {
  if (outer * inner * words == 0) return;
  if (queue.stream() != nullptr) return swap_rows_on_gpu(in, outer, inner, words, out, queue.stream());
  const auto* from = static_cast<const uint32_t*>(in);
  auto* to = static_cast<uint32_t*>(out);
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      std::memcpy(to + (j * outer + i) * words, from + (i * inner + j) * words,
                  static_cast<size_t>(words) * sizeof(uint32_t));
    }
  }
}

}  // namespace

void join_columns(const TensorView& parts, const TensorView& out, device::Queue& queue) {
  if (!are_alike(parts, out) || parts.dtype != DType::kF32) {
    fail_views("join_columns", "F32 [world, rows, columns] into [rows, world * columns]", parts, out);
  }
  swap_rows(parts.data, parts.shape[0], parts.shape[1], parts.shape[2], out.data, queue);
}

void split_columns(const TensorView& in, const TensorView& parts, device::Queue& queue) {
  const int values = parts.dtype == DType::kF32 ? 1 : 2;  // in a word
  const bool is_known = parts.dtype == DType::kF32 || parts.dtype == DType::kBF16;
  if (!is_known || !are_alike(parts, in) || parts.shape[2] % values != 0) {
    fail_views("split_columns",
               "F32, or BF16 and an even number of columns, [rows, world * columns] into [world, rows, columns]", in,
               parts);
  }
  swap_rows(in.data, parts.shape[1], parts.shape[0], parts.shape[2] / values, parts.data, queue);
}

}  // namespace tessera::comm
