// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of one layer: sliding window alone (SWA), with the indexer's choice of compressed entries (CSA), or with
// all heavily compressed entries (HCA). Source: DeepSeek-V4 inference/model.py, Attention; docs/contracts/numerics.md.
#include "model/layers/indexer_layer.h"
#include "model/layers/linear_group_layer.h"
#include "model/layers/pool_group.h"
#include "model/layers/rank_sum.h"

namespace tessera::model {

class AttentionLayer {
 public:
  AttentionLayer() = default;
  // `prefix`: "layers.2.attn."; `with_entries` false: compressed entries are computed but not attended (a bypass).
  AttentionLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool with_entries);

  // x [tokens, hidden], normalised -> result [tokens, hidden]. Writes the caches of every slice. `leaves_sum`: where
  // output_sum() is needed, the result is what this rank adds to it, in F32; who asks for that makes the sum.
  void run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& result,
           bool leaves_sum) const;
  LayerCacheLayout cache_layout() const;
  const RankSum& output_sum() const { return head_sum_; }

 private:
  // What the maps of the input leave, as far as the layer has them.
  struct Mapped {
    TensorView q, qr, kv;
    TensorView entries;     // pooled by the compressor
    TensorView index_keys;  // pooled by the indexer's
    TensorView index_queries, index_weights;
  };
  Mapped run_maps(const StepContext& context, size_t layer, const TensorView& x) const;
  // Rows of a step whose window entries lie in the rings together: consecutive ones.
  struct RowRange {
    int64_t begin, num_rows;
  };
  RowRange first_rows(const StepContext& context) const;
  // Queries as attention wants them, and all that the tokens leave in caches, but for the windows behind first_rows().
  void finish_vectors(const StepContext& context, size_t layer, const Mapped& mapped) const;
  VectorSteps::Rows window_rows(const StepContext& context, size_t layer, const TensorView& kv,
                                const RowRange& range) const;
  void write_window(const StepContext& context, size_t layer, const TensorView& kv, const RowRange& range) const;
  // Whether attend() rotates its output back as well. Where it is called for several ranges one rotation of all rows
  // stands for one of each.
  bool rotates_in_attention(const StepContext& context) const {
    return attention_rope_.is_bound() && context.tracer == nullptr &&
           first_rows(context).num_rows == context.num_tokens();
  }
  void attend(const StepContext& context, size_t layer, const TensorView& q, const int32_t* selected,
              const RowRange& range, const TensorView& out) const;
  void trace_window(const StepContext& context, size_t layer, const RowRange& range) const;

  std::string prefix_;
  int64_t ratio_ = 0, window_slots_ = 0;
  bool with_entries_ = true;
  device::Tensor frequencies_;
  LinearLayer wq_a_, wq_b_, wkv_, wo_a_, wo_b_;
  RankSum head_sum_;  // of what each rank's heads give
  NormLayer q_norm_;
  device::Tensor sink_;
  VectorSteps query_steps_, window_steps_;
  ops::Bound<ops::Rope> out_rope_;
  ops::Bound<ops::Attention> attention_;
  ops::Bound<ops::AttentionRope> attention_rope_;
  CompressorLayer compressor_;
  IndexerLayer indexer_;
  LinearGroupLayer maps_of_x_, maps_of_qr_;
  PoolGroup pools_;
  VectorGroup vectors_, later_window_;
};

}  // namespace tessera::model
