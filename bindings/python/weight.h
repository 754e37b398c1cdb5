// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights of other libraries, as the ops take them.
#include <memory>
#include <vector>

#include "bindings/python/arrays.h"

namespace tessera::python {

// One matrix, or as many of one shape, as checkpoints have them.
class Weight {
 public:
  Weight(DevicePtr device, nb::handle data, nb::handle block_scales, const std::vector<float>& tensor_scales);

  bool has_scales() const { return format_ == TESSERA_WEIGHT_NVFP4 || format_ == TESSERA_WEIGHT_FP8_BLOCK; }
  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  const DevicePtr& device() const { return device_; }
  const char* format() const;
  // Of each matrix.
  std::vector<tessera_weight> views() const;

 private:
  DevicePtr device_;
  Array data_, scales_;
  tessera_weight_format format_ = TESSERA_WEIGHT_F32;
  int64_t count_ = 1, rows_ = 0, cols_ = 0;
  std::vector<float> tensor_scales_;
};

using WeightPtr = std::shared_ptr<Weight>;

// Throws kInvalidArgument, naming it, for a weight of another context. Null is none.
void check_device(const DevicePtr& device, const WeightPtr& weight, const char* name);

}  // namespace tessera::python
