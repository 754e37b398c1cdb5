// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight with the op that multiplies by it, and a weight with its norm.
#include <string>

#include "model/layers/layer_builder.h"
#include "model/layers/step_context.h"

namespace tessera::model {

// What a linear map's input may be rounded to in the modes a4 and a8 (docs/contracts/numerics.md, section 2).
enum class InputRole {
  kQuantised,  // NVFP4 in a4 where the weight is NVFP4; E4M3 in a8 where the weight is quantised
  kGrouped,    // the output projection's first half: NVFP4 in a4, never E4M3 (as in the official implementation)
  kPlain,      // router, compressor, indexer weights, head: never
};

ops::InputMode resolve_input(ops::InputMode mode, ops::WeightFormat format, InputRole role);

class LinearLayer {
 public:
  LinearLayer() = default;
  // Loads and binds `name` (official, without ".weight"), a map of `groups` blocks on the diagonal.
  LinearLayer(LayerBuilder& builder, const std::string& name, InputRole role, DType output, int64_t groups = 1);

  // The part of it that `shard` has (ModelWeights::load_part); `where` names it in plans and traces.
  LinearLayer(LayerBuilder& builder, const std::string& name, const Shard& shard, const std::string& where,
              InputRole role, DType output, int64_t groups = 1);

  // x [rows, groups * in] -> y [rows, groups * out]; y is taken from the arena, or given.
  TensorView run(const StepContext& context, const TensorView& x, int64_t num_rows) const;
  void run_into(const StepContext& context, const TensorView& x, const TensorView& y, int64_t num_rows) const;
  int64_t out_features() const { return op_.desc.out * op_.desc.groups; }
  // Memory for y of so many rows.
  TensorView take_output(const StepContext& context, int64_t num_rows) const {
    return context.take(op_.desc.output, {num_rows, out_features()});
  }
  // What a fused op of which the map is a part is made of.
  const ops::Bound<ops::Linear>& op() const { return op_; }
  const ops::WeightView& weight() const { return weight_.view; }

 private:
  std::string name_;
  ops::Bound<ops::Linear> op_;
  Matrix weight_;
};

class NormLayer {
 public:
  NormLayer() = default;
  // `name` is the official name with ".weight"; empty: no weight.
  NormLayer(LayerBuilder& builder, const std::string& where, const std::string& name, int64_t width);
  // In place or into `out`.
  void run(const StepContext& context, const TensorView& x, const TensorView& out, int64_t num_rows) const;
  // What a fused op of which the norm is a part is made of.
  const ops::Bound<ops::RmsNorm>& op() const { return op_; }
  TensorView weight() const { return weight_; }

 private:
  std::string where_;
  ops::Bound<ops::RmsNorm> op_;
  device::Tensor weight_;
};

}  // namespace tessera::model
