// SPDX-License-Identifier: Apache-2.0
#pragma once
// Non-owning views: an address, an element type and a row-major shape.
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "tensor/dtype.h"

namespace tessera {

constexpr int kMaxRank = 8;

// A row-major shape of at most kMaxRank dimensions; rank 0 is a scalar (one element).
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  explicit Shape(std::span<const int64_t> dims);  // throws kInvalidArgument: too many dimensions, or a negative one
  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t num_elements() const;
  std::string to_string() const;  // "[4096, 2048]"
  friend bool operator==(const Shape& a, const Shape& b) = default;

 private:
  int rank_ = 0;
  std::array<int64_t, kMaxRank> dims_{};
};

// `data` may be null only where the shape holds no element. For DType::kF4 two elements share a byte.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  int64_t num_bytes() const { return (shape.num_elements() * dtype_bits(dtype) + 7) / 8; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace tessera
