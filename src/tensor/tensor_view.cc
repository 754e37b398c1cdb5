// SPDX-License-Identifier: Apache-2.0
#include "tensor/tensor_view.h"

#include <fmt/format.h>

#include "base/error.h"

namespace tessera {

Shape::Shape(std::initializer_list<int64_t> dims) : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const int64_t> dims) {
  if (dims.size() > kMaxRank) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("a shape has at most {} dimensions, found {}", kMaxRank, dims.size()));
  }
  for (const int64_t dim : dims) {
    if (dim < 0) fail(ErrorCode::kInvalidArgument, fmt::format("a dimension is never negative, found {}", dim));
    dims_[static_cast<size_t>(rank_++)] = dim;
  }
}

int64_t Shape::num_elements() const {
  int64_t count = 1;
  for (int i = 0; i < rank_; ++i) count *= (*this)[i];
  return count;
}

std::string Shape::to_string() const {
  std::string out = "[";
  for (int i = 0; i < rank_; ++i) out += fmt::format("{}{}", i == 0 ? "" : ", ", (*this)[i]);
  return out + "]";
}

}  // namespace tessera
