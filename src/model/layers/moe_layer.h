// SPDX-License-Identifier: Apache-2.0
#pragma once
// Mixture of experts: router, routed experts, shared expert; and their sum, which the caller starts.
// Source: DeepSeek-V4 inference/model.py, MoE, Gate and Expert.
#include <vector>

#include "model/bypass.h"
#include "model/layers/linear_layer.h"
#include "model/layers/rank_sum.h"

namespace tessera::model {

// Bytes that the routed experts of the layer of `prefix` take on this rank beyond their own, once they are packed as
// the kernels that the planner chooses have them: padding to whole units. No weight is read. 0 where nothing computes
// them: who builds the layer says why.
uint64_t expert_padding(ops::Planner& planner, const Config& config, const ModelWeights& weights,
                        const ops::Precision& precision, const std::string& prefix);

class MoeLayer {
 public:
  MoeLayer() = default;
  // `prefix`: "layers.2.ffn."; `is_hashed`: routed by the table of token ids.
  MoeLayer(LayerBuilder& builder, const std::string& prefix, bool is_hashed, const Bypass& bypass);

  // x [tokens, hidden], normalised -> what combine() is to add, into `out` [tokens, hidden]; from the arena.
  ops::MoeCombine::Args run(const StepContext& context, const TensorView& x, const TensorView& out) const;
  const ops::Bound<ops::MoeCombine>& combine() const { return combine_; }
  // What combine() gives is a part where this is needed.
  const RankSum& output_sum() const { return output_sum_; }

 private:
  void load_experts(LayerBuilder& builder);
  // Into gated.y[0], then down.y.
  void run_shared(const StepContext& context, const ops::LinearGroup::Args& gated, const ops::Linear::Args& down) const;

  std::string prefix_;
  Bypass bypass_;
  LinearLayer gate_;
  device::Tensor bias_, table_;
  ops::Bound<ops::Router> router_;
  ops::Bound<ops::MoeExperts> experts_;
  std::vector<Matrix> matrices_;  // of the experts
  device::Buffer w1_, w2_, w3_;   // ops::WeightView of each, by local expert
  LinearLayer shared_w1_, shared_w2_, shared_w3_;
  ops::Bound<ops::SwiGlu> swiglu_;
  ops::Bound<ops::LinearGroup> shared_gated_;  // w1, w3 and swiglu
  ops::Bound<ops::AllExperts> all_experts_;    // these, w2 and the routed experts
  ops::Bound<ops::MoeCombine> combine_;
  RankSum slot_sum_;    // experts by id: a slot is zero on all ranks but that of its expert
  RankSum output_sum_;  // experts by width
};

}  // namespace tessera::model
