// SPDX-License-Identifier: Apache-2.0
#pragma once
// A hypothesis about what is wrong, as the edit that would undo it. Repairs are made in memory only, while a matrix is
// loaded, to see whether the model predicts the sample better with them: nothing on disk is changed.
#include <map>
#include <string>
#include <vector>

#include "doctor/scale_fit.h"
#include "model/weight_source.h"

namespace tessera::doctor {

enum class RepairKind {
  kSwapNibbles,     // exchange the two codes of every byte
  kGgufOrder,       // codes stored as j and j + 8 in a byte
  kReorderScales,   // block scales stored in `order`
  kMultiply,        // every value times `factor` (a matrix: its tensor scale, FP8 block scales, or BF16 and F32 values)
  kAdd,             // a vector: every value plus `offset`
  kReadFrom,        // the values of tensor `other`
  kPermuteRows,     // row r of the result is row rows[r] of the tensor
  kRollRows,        // row r of the result is row r + shift of the tensor, around the end; tables too
  kShiftFp8Scales,  // FP8 block scales of the block `shift` places further in row-major order
};

struct Repair {
  RepairKind kind = RepairKind::kMultiply;
  std::string tensor;  // official name, without ".weight"
  std::string other{};
  double factor = 1, offset = 0;
  ScaleOrder order = ScaleOrder::kLinear;
  std::vector<int64_t> rows{};
  int64_t shift = 0;
};

// By tensor: several may apply to one, in the order given.
class RepairPlan {
 public:
  void add(Repair repair);
  bool empty() const { return by_tensor_.empty(); }
  const std::map<std::string, std::vector<Repair>>& by_tensor() const { return by_tensor_; }
  // The first layer that a repair touches, 0 for the embedding; `num_layers` where none does.
  int64_t first_layer(int64_t num_layers) const;

 private:
  std::map<std::string, std::vector<Repair>> by_tensor_;
};

// Makes a plan's repairs while matrices are loaded. `plain` is another source of the same checkpoint, without an edit.
class RepairEdit final : public model::WeightEdit {
 public:
  RepairEdit(const RepairPlan& plan, model::WeightSource& plain) : plan_(plan), plain_(plain) {}
  void edit(const std::string& name, model::Matrix& matrix) const override;
  void edit_values(const std::string& name, device::Tensor& values) const override;

 private:
  const RepairPlan& plan_;
  model::WeightSource& plain_;
};

// Whether the repair can be made on a matrix of that format.
bool can_repair(const Repair& repair, ops::WeightFormat format);

}  // namespace tessera::doctor
