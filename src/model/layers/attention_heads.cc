// SPDX-License-Identifier: Apache-2.0
#include "model/layers/attention_heads.h"

#include <cmath>

namespace tessera::model {

AttentionHeads::AttentionHeads(LayerBuilder& builder, const std::string& prefix, const std::string& where,
                               const Shard& shard) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  wq_b_ = LinearLayer(builder, prefix + "wq_b", shard, where + "wq_b", InputRole::kQuantised, activation);
  // Heads and groups of this part, from the weights' slices.
  const int64_t heads = wq_b_.out_features() / c.head_dim;
  const int64_t groups = heads / c.heads_per_group();
  wo_a_ = LinearLayer(builder, prefix + "wo_a", shard, where + "wo_a", InputRole::kGrouped, activation, groups);
  sink_ = builder.weights.load_vector_part(prefix + "attn_sink", shard);
  steps_.norm.emplace(builder, where + "q_head_norm", "", c.head_dim);
  const ops::Rope::Desc rope{.vectors = heads, .width = c.head_dim, .rope_dim = c.rope_dim, .activation = activation};
  ops::Rope::Desc out_rope = rope;
  out_rope.is_inverse = true;
  steps_.rope = builder.bind<ops::Rope>(where + "q_rope", rope);
  steps_.rotated = where + "q";
  out_rope_ = builder.bind<ops::Rope>(where + "out_rope", out_rope);
  attention_ = builder.bind<ops::Attention>(
      where + "attention", {.heads = heads,
                            .head_dim = c.head_dim,
                            .window = c.sliding_window,
                            .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim))),
                            .layout = ops::kv_entry_layout(builder.precision, c.head_dim, c.rope_dim),
                            .activation = activation});
  attention_rope_ = builder.bind_fused<ops::AttentionRope>(
      where + "attend", {.attention = attention_.desc, .rope = out_rope}, {attention_.chosen(), out_rope_.chosen()});
}

std::unique_ptr<AttentionHeads> AttentionHeads::all_like(const AttentionHeads& own, LayerBuilder& builder,
                                                         const std::string& prefix) {
  const Shard &shard = builder.weights.shard(), whole = with_whole_attention(shard);
  if (!shard.keeps_all_heads || shard.attention != AttentionSplit::kByGroup || shard.world == 1) return nullptr;
  // Few heads may have another kernel (of Flash on eight ranks, eight).
  ops::Attention::Desc desc = own.attention_.desc;
  desc.heads = builder.config.num_heads;
  if (builder.planner.bind<ops::Attention>(prefix + "all_heads.attention", desc).chosen() != own.attention_.chosen()) {
    return nullptr;
  }
  // A part that begins within a block of scales is kept otherwise, which some ranks' may do and others' not.
  for (const char* name : {"wq_b", "wo_a"}) {
    const ops::WeightFormat format = builder.weights.part_format(prefix + name, whole);
    Shard part = shard;
    for (part.rank = 0; part.rank < part.world; ++part.rank) {
      if (builder.weights.part_format(prefix + name, part) != format) return nullptr;
    }
  }
  auto all = std::make_unique<AttentionHeads>(builder, prefix, prefix + "all_heads.", whole);
  const auto are_alike = [](const auto& a, const auto& b) { return a.chosen() == b.chosen(); };
  const bool have_same_kernels =
      are_alike(all->wq_b_.op(), own.wq_b_.op()) && are_alike(all->wo_a_.op(), own.wo_a_.op()) &&
      are_alike(all->attention_, own.attention_) && are_alike(all->steps_.rope, own.steps_.rope) &&
      are_alike(all->out_rope_, own.out_rope_);
  return have_same_kernels ? std::move(all) : nullptr;
}

void AttentionHeads::attend(const StepContext& context, ops::Attention::Args args, const float* frequencies) const {
  args.sink = sink_.as<float>();
  args.workspace = context.workspace;
  if (frequencies == nullptr) return attention_.run(args, context.queue);
  attention_rope_.run(
      {.attention = args, .frequencies = frequencies, .num_tokens = args.num_tokens, .workspace = args.workspace},
      context.queue);
}

void AttentionHeads::rotate_back(const StepContext& context, const TensorView& out, const int64_t* positions,
                                 const float* frequencies) const {
  out_rope_.run({.x = out, .positions = positions, .frequencies = frequencies, .num_tokens = out.shape[0]},
                context.queue);
}

}  // namespace tessera::model
