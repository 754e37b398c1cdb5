// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "base/error.h"
#include "tensor/tensor_view.h"

namespace tessera {
namespace {

TEST(DType, NamesAndSizes) {
  for (int i = 0; i <= static_cast<int>(DType::kF6E3M2); ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
    EXPECT_GT(dtype_bits(dtype), 0);
  }
  EXPECT_EQ(dtype_name(DType::kF8E4M3), "F8_E4M3");
  EXPECT_EQ(dtype_bits(DType::kF4), 4);
  EXPECT_FALSE(dtype_from_name("F12").has_value());
}

TEST(Shape, CountsAndPrints) {
  EXPECT_EQ(Shape{}.num_elements(), 1) << "a scalar";
  EXPECT_EQ((Shape{3, 0, 5}).num_elements(), 0);
  EXPECT_EQ((Shape{4096, 2048}).to_string(), "[4096, 2048]");
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), Error);
  EXPECT_THROW((Shape{-1}), Error);
  EXPECT_FALSE((Shape{2} == Shape{2, 1}));
  EXPECT_EQ((TensorView{nullptr, DType::kF4, {3}}).num_bytes(), 2);
}

}  // namespace
}  // namespace tessera
