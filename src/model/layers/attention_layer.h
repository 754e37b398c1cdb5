// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of one layer: sliding window alone (SWA), with the indexer's choice of compressed entries (CSA), or with
// all heavily compressed entries (HCA). Source: DeepSeek-V4 inference/model.py, Attention; docs/contracts/numerics.md.
#include "model/layers/attention_heads.h"
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

  // Loads the others' heads, where they are kept, and binds what is of this rank's own tokens: for run_own(), which a
  // layer of a draft block, whose steps are whole, is not asked for. Once.
  void prepare_own_tokens(LayerBuilder& builder);

  // x [tokens, hidden], normalised -> result [tokens, hidden]. Writes the caches of every slice. `leaves_sum`: where
  // output_sum() is needed, the result is what this rank adds to it, in F32; who asks for that makes the sum.
  void run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& result,
           bool leaves_sum) const;
  // Whether this rank computes all heads of its own tokens in steps that are cut by token.
  bool has_all_heads() const { return has_all_heads_; }
  // That: x [run.count, hidden] of this rank's tokens -> result, the same of theirs. Writes caches as run() does, of
  // all tokens: what maps of x leave for those is gathered, which x itself then need not be.
  void run_own(const StepContext& context, size_t layer, const TensorView& x, const TensorView& result) const;
  LayerCacheLayout cache_layout() const;
  const RankSum& output_sum() const { return head_sum_; }

 private:
  // Consecutive rows of a step.
  struct RowRange {
    int64_t begin, num_rows;
  };
  // What queries are computed of which rows with.
  struct Queries {
    const AttentionHeads& heads;
    const VectorGroup& vectors;
    RowRange rows;
  };
  // What the maps of the input leave, as far as the layer has them: of all rows, but what is of queries.
  struct Mapped {
    TensorView q, qr, kv;
    TensorView entries;     // pooled by the compressor
    TensorView index_keys;  // pooled by the indexer's
    TensorView index_queries, index_weights;
  };
  // Of x, in this order; and of qr.
  std::vector<const LinearLayer*> maps_of_input() const;
  std::vector<const LinearLayer*> maps_of_queries(const AttentionHeads& heads) const;
  VectorGroup bind_vectors(LayerBuilder& builder, const std::string& where, const AttentionHeads& heads) const;
  Mapped run_maps(const StepContext& context, size_t layer, const TensorView& x, const Queries& queries) const;
  // Rows whose window entries lie in the rings together.
  RowRange first_rows(const StepContext& context) const;
  // Queries as attention wants them, and all that the tokens leave in caches, but for the windows behind first_rows().
  void finish_vectors(const StepContext& context, size_t layer, const Mapped& mapped, const Queries& queries) const;
  // Whether these rows' window entries are looked at: by queries of this step, or by a later one.
  bool needs_window(const StepContext& context, const RowRange& range, const RowRange& queries) const;
  VectorSteps::Rows window_rows(const StepContext& context, size_t layer, const TensorView& kv,
                                const RowRange& range) const;
  void write_window(const StepContext& context, size_t layer, const TensorView& kv, const RowRange& range) const;
  // Whether attend() rotates its output back as well. Where it is called for several ranges one rotation of all rows
  // stands for one of each.
  bool rotates_in_attention(const StepContext& context, const Queries& queries) const {
    return queries.heads.can_rotate() && context.tracer == nullptr &&
           first_rows(context).num_rows == context.num_tokens();
  }
  // Those of the step's sequences, of all its rows, for `queries` of them.
  ops::PagedEntries<const uint8_t> entries_of(const StepContext& context, size_t layer, const RowRange& queries) const;
  // Those of `range` that queries are of. q, out and selected are of the queries' rows.
  void attend(const StepContext& context, size_t layer, const Queries& queries, const TensorView& q,
              const ops::PagedEntries<const uint8_t>& all_entries, const int32_t* selected, const RowRange& range,
              const TensorView& out) const;
  // x -> heads' output for the output projection [rows of queries, groups * o_lora_rank], from the arena.
  TensorView run_heads(const StepContext& context, size_t layer, const TensorView& x, const Queries& queries) const;
  void trace_window(const StepContext& context, size_t layer, const RowRange& range) const;

  std::string prefix_;
  int64_t ratio_ = 0, window_slots_ = 0;
  bool with_entries_ = true;
  device::Tensor frequencies_;
  LinearLayer wq_a_, wkv_, wo_b_;
  RankSum head_sum_;  // of what each rank's heads give
  NormLayer q_norm_;
  AttentionHeads heads_;                       // this rank's
  std::unique_ptr<AttentionHeads> all_heads_;  // null: not kept
  bool has_all_heads_ = false;
  std::vector<LinearLayer> wo_b_of_ranks_;  // with all_heads_: the other ranks' wo_b, each at its place
  VectorSteps window_steps_;
  CompressorLayer compressor_;
  IndexerLayer indexer_;
  LinearGroupLayer maps_of_x_, maps_of_qr_, all_maps_of_qr_;
  PoolGroup pools_;
  VectorGroup vectors_, all_vectors_, later_window_;
};

}  // namespace tessera::model
