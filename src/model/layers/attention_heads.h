// SPDX-License-Identifier: Apache-2.0
#pragma once
// Heads of a layer's attention, from low-rank queries to the groups of the output projection: those that a rank has, of
// every token; or, in steps that are cut by token (token_run.h), all heads of the rank's own tokens, which fills tiles
// that few heads leave empty and takes no sum over ranks. A token's values are the same bits either way.
// Source: docs/decisions/0031-several-gpus.md, "All heads of a rank's own tokens".
#include <memory>
#include <string>

#include "model/layers/linear_layer.h"
#include "model/layers/vector_steps.h"

namespace tessera::model {

class AttentionHeads {
 public:
  AttentionHeads() = default;
  // Those that `shard` has. `prefix`: "layers.2.attn."; `where` begins their names in plans and traces.
  AttentionHeads(LayerBuilder& builder, const std::string& prefix, const std::string& where, const Shard& shard);
  // All heads, where the weights' shard keeps them and theirs are the bits of `own`, this rank's: formats and kernels
  // are the same. Null else, and on every rank alike.
  static std::unique_ptr<AttentionHeads> all_like(const AttentionHeads& own, LayerBuilder& builder,
                                                  const std::string& prefix);

  const LinearLayer& wq_b() const { return wq_b_; }
  const VectorSteps& steps() const { return steps_; }  // of queries
  const ops::Attention::Desc& desc() const { return attention_.desc; }

  // Whether attend() can do the inverse rotation of its output as well.
  bool can_rotate() const { return attention_rope_.is_bound(); }
  // `args` without sink and workspace. `frequencies` not null: rotated too, of who can.
  void attend(const StepContext& context, ops::Attention::Args args, const float* frequencies) const;
  // The inverse rotation alone, of out [rows, heads, head_dim], in place.
  void rotate_back(const StepContext& context, const TensorView& out, const int64_t* positions,
                   const float* frequencies) const;
  // out -> [rows, groups * o_lora_rank], from the arena.
  TensorView to_groups(const StepContext& context, const TensorView& out) const {
    return wo_a_.run(context, out, out.shape[0]);
  }

 private:
  LinearLayer wq_b_, wo_a_;
  device::Tensor sink_;
  VectorSteps steps_;
  ops::Bound<ops::Rope> out_rope_;
  ops::Bound<ops::Attention> attention_;
  ops::Bound<ops::AttentionRope> attention_rope_;
};

}  // namespace tessera::model
