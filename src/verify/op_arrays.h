// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which arrays an op's Args hold, how long they are and what happens to them: what a stage (verify/stage.h) copies. One
// function per op; lengths that Args don't say follow from the indices in them.
#include <algorithm>

#include "verify/stage.h"

namespace tessera::verify {

// The largest of `count` values, and 0.
template <class T>
int64_t largest_of(const T* values, int64_t count) {
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<int64_t>(values[i]));
  return largest;
}

inline void add_arrays(Stage& stage, const ops::Embedding::Desc&, ops::Embedding::Args& args) {
  stage.add(args.weight, Access::kInput);
  stage.add(args.ids, args.num_tokens * 4, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::RmsNorm::Desc&, ops::RmsNorm::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.weight, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Rope::Desc& desc, ops::Rope::Args& args) {
  stage.add(args.x, Access::kOutput);
  stage.add(args.positions, args.num_tokens * 8, Access::kInput);
  stage.add(args.frequencies, desc.rope_dim / 2 * 4, Access::kInput);
}

inline void add_arrays(Stage& stage, const ops::MhcDesc& desc, ops::MhcPre::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.fn, ops::kHcCoefficients * 4 * desc.hidden * 4, Access::kInput);
  stage.add(args.base, ops::kHcCoefficients * 4, Access::kInput);
  stage.add(args.scale, 3 * 4, Access::kInput);
  stage.add(args.y, Access::kOutput);
  stage.add(args.post, args.num_tokens * 4 * 4, Access::kOutput);
  stage.add(args.comb, args.num_tokens * 16 * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::MhcDesc&, ops::MhcPost::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.o, Access::kInput);
  stage.add(args.post, args.num_tokens * 4 * 4, Access::kInput);
  stage.add(args.comb, args.num_tokens * 16 * 4, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::MhcDesc& desc, ops::MhcHead::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.rows, args.num_rows * 4, Access::kInput);
  stage.add(args.fn, 4 * 4 * desc.hidden * 4, Access::kInput);
  stage.add(args.base, 4 * 4, Access::kInput);
  stage.add(args.scale, 4, Access::kInput);
  stage.add(args.h, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Linear::Desc&, ops::Linear::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.weight);
  stage.add(args.y, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::MoeExperts::Desc& desc, ops::MoeExperts::Args& args) {
  stage.add(args.x, Access::kInput);
  stage.add(args.experts, args.num_tokens * desc.top_k * 4, Access::kInput);
  stage.add(args.routing, args.num_tokens * desc.top_k * 4, Access::kInput);
  for (const ops::WeightView** weights : {&args.w1, &args.w3, &args.w2}) stage.add(*weights, desc.num_local);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::SwiGlu::Desc&, ops::SwiGlu::Args& args) {
  stage.add(args.gate, Access::kInput);
  stage.add(args.up, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::MoeCombine::Desc&, ops::MoeCombine::Args& args) {
  stage.add(args.routed, Access::kInput);
  stage.add(args.shared, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Router::Desc& desc, ops::Router::Args& args) {
  const int64_t rows = desc.is_hashed ? largest_of(args.token_ids, args.num_tokens) + 1 : 0;
  stage.add(args.logits, args.num_tokens * desc.num_experts * 4, Access::kInput);
  stage.add(args.bias, desc.num_experts * 4, Access::kInput);
  stage.add(args.table, rows * desc.top_k * 4, Access::kInput);
  stage.add(args.token_ids, args.num_tokens * 4, Access::kInput);
  stage.add(args.experts, args.num_tokens * desc.top_k * 4, Access::kOutput);
  stage.add(args.weights, args.num_tokens * desc.top_k * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::CacheWrite::Desc& desc, ops::CacheWrite::Args& args) {
  const int64_t entries = args.num_rows == 0 ? 0 : largest_of(args.slots, args.num_rows) + 1;
  stage.add(args.rows, Access::kInput);
  stage.add(args.slots, args.num_rows * 8, Access::kInput);
  stage.add(args.cache, args.num_rows, entries, desc.layout.entry_bytes(), Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Hadamard::Desc&, ops::Hadamard::Args& args) {
  stage.add(args.x, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::CompressorPool::Desc& desc, ops::CompressorPool::Args& args) {
  const int64_t row_bytes = desc.row_width() * 4;
  int64_t num_rows = 0, num_places = 0;
  for (int64_t i = 0; i < args.num_slices; ++i) {
    num_rows = std::max<int64_t>(num_rows, args.slices[i].first_row + args.slices[i].num_rows);
    num_places = std::max<int64_t>(num_places, args.slices[i].place + 1);
  }
  stage.add(args.values, num_rows * row_bytes, Access::kInput);
  stage.add(args.gates, num_rows * row_bytes, Access::kInput);
  stage.add(args.ape, desc.ratio * row_bytes, Access::kInput);
  stage.add_table(args.state, num_places, desc.state_floats() * 4, Access::kOutput);
  stage.add(args.slices, args.num_slices * static_cast<int64_t>(sizeof(ops::CompressorSlice)), Access::kInput);
  stage.add(args.entries, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::IndexScores::Desc& desc, ops::IndexScores::Args& args) {
  stage.add(args.queries, Access::kInput);
  stage.add(args.weights, Access::kInput);
  stage.add(args.keys, args.num_tokens, largest_of(args.counts, args.num_tokens), desc.keys.entry_bytes(),
            Access::kInput);
  stage.add(args.counts, args.num_tokens * 4, Access::kInput);
  stage.add(args.scores, args.num_tokens * args.stride * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::TopK::Desc& desc, ops::TopK::Args& args) {
  stage.add(args.scores, args.num_tokens * args.stride * 4, Access::kInput);
  stage.add(args.counts, args.num_tokens * 4, Access::kInput);
  stage.add(args.selected, args.num_tokens * desc.k * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Attention::Desc& desc, ops::Attention::Args& args) {
  const int64_t entry_bytes = desc.layout.entry_bytes(), indices = args.num_tokens * args.selected_stride;
  int64_t num_entries = 0;
  if (args.entry_cache.exists()) {
    num_entries = args.selected != nullptr ? largest_of(args.selected, indices) + 1
                                           : largest_of(args.num_entries, args.num_tokens);
  }
  stage.add(args.q, Access::kInput);
  stage.add(args.positions, args.num_tokens * 8, Access::kInput);
  stage.add(args.window_cache, args.num_tokens, args.window_slots * entry_bytes, Access::kInput);
  stage.add(args.entry_cache, args.num_tokens, num_entries, entry_bytes, Access::kInput);
  stage.add(args.num_entries, args.num_tokens * 4, Access::kInput);
  stage.add(args.selected, indices * 4, Access::kInput);
  stage.add(args.sink, desc.heads * 4, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::StreamAdd::Desc&, ops::StreamAdd::Args& args) {
  stage.add(args.z, Access::kInput);
  stage.add(args.e, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::FiniteCheck::Desc& desc, ops::FiniteCheck::Args& args) {
  stage.add(args.values, args.num_rows * desc.width * 4, Access::kInput);
  stage.add(args.first_bad, args.num_rows * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::Sample::Desc& desc, ops::Sample::Args& args) {
  int64_t num_logit_rows = 0, num_masks = 0;
  for (int64_t i = 0; i < args.num_rows; ++i) {
    num_masks = std::max<int64_t>(num_masks, args.rows[i].mask_row + 1);
    num_logit_rows = std::max<int64_t>(num_logit_rows, args.rows[i].logit_row + 1);
  }
  stage.add(args.logits, num_logit_rows * desc.vocab * 4, Access::kOutput);
  stage.add(args.rows, args.num_rows * static_cast<int64_t>(sizeof(ops::SampleRow)), Access::kInput);
  stage.add(args.counts, desc.vocab * 4, Access::kInput);
  stage.add(args.bias_ids, args.num_bias * 4, Access::kInput);
  stage.add(args.bias_values, args.num_bias * 4, Access::kInput);
  stage.add(args.masks, num_masks * ops::mask_words(desc.vocab) * 4, Access::kInput);
  stage.add(args.tokens, args.num_rows * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::RandomFill::Desc& desc, ops::RandomFill::Args& args) {
  stage.add(args.out, args.count * dtype_bits(desc.dtype) / 8, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::QuantizeNvfp4::Desc& desc, ops::QuantizeNvfp4::Args& args) {
  const int64_t rows = args.x.shape[0], count = args.x.shape.num_elements();
  stage.add(args.x, Access::kInput);
  stage.add(args.codes, count / 2, Access::kOutput);
  stage.add(args.scales, count / numeric::kNvfp4Block, Access::kOutput);
  stage.add(args.globals, (desc.rule == ops::QuantizeNvfp4::Rule::kRows ? rows : 1) * 4, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::NormRope::Desc& desc, ops::NormRope::Args& args) {
  for (size_t i = 0; i < desc.sets.size(); ++i) {
    const ops::NormRope::SetDesc& set = desc.sets[i];
    ops::NormRope::Set& of = args.sets[i];
    stage.add(of.x, Access::kOutput);
    stage.add(of.weight, Access::kInput);
    stage.add(of.positions, of.num_rows * 8, Access::kInput);
    stage.add(of.frequencies, set.rope.rope_dim / 2 * 4, Access::kInput);
    if (!set.write) continue;
    const int64_t entries = of.num_rows == 0 ? 0 : largest_of(of.slots, of.num_rows) + 1;
    stage.add(of.slots, of.num_rows * 8, Access::kInput);
    stage.add(of.cache, of.num_rows, entries, set.write->layout.entry_bytes(), Access::kOutput);
  }
}

inline void add_arrays(Stage& stage, const ops::PoolNorm::Desc& desc, ops::PoolNorm::Args& args) {
  for (size_t i = 0; i < desc.pools.size(); ++i) add_arrays(stage, desc.pools[i], args.pools[i]);
  if (desc.norm) add_arrays(stage, *desc.norm, args.norm);
}

inline void add_arrays(Stage& stage, const ops::AttentionRope::Desc& desc, ops::AttentionRope::Args& args) {
  args.attention.num_tokens = args.num_tokens;
  add_arrays(stage, desc.attention, args.attention);
  stage.add(args.frequencies, desc.rope.rope_dim / 2 * 4, Access::kInput);
}

inline void add_arrays(Stage& stage, const ops::MhcPostPre::Desc& desc, ops::MhcPostPre::Args& args) {
  args.combine.num_tokens = args.post.num_tokens = args.pre.num_tokens = args.num_tokens;
  if (desc.combine) add_arrays(stage, *desc.combine, args.combine);
  if (desc.has_post) add_arrays(stage, desc.mhc, args.post);
  if (!desc.norm) return;
  add_arrays(stage, desc.mhc, args.pre);
  stage.add(args.weight, Access::kInput);
}

inline void add_arrays(Stage& stage, const ops::LinearGroup::Desc& desc, ops::LinearGroup::Args& args) {
  stage.add(args.x, Access::kInput);
  if (desc.norm) stage.add(args.norm_weight, Access::kInput);
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    stage.add(args.weights[i]);
    stage.add(args.y[i], Access::kOutput);
  }
}

inline void add_arrays(Stage& stage, const ops::AllExperts::Desc& desc, ops::AllExperts::Args& args) {
  args.routed.num_tokens = args.gated.num_tokens = args.down.num_tokens = args.num_tokens;
  add_arrays(stage, desc.routed, args.routed);
  add_arrays(stage, desc.gated, args.gated);
  add_arrays(stage, desc.down, args.down);
}

inline void add_arrays(Stage& stage, const ops::RankExperts::Desc& desc, ops::RankExperts::Args& args) {
  args.routed.num_tokens = args.num_tokens;
  add_arrays(stage, desc.routed, args.routed);
  stage.add(args.shared, Access::kInput);
  stage.add(args.out, Access::kOutput);
}

inline void add_arrays(Stage& stage, const ops::GroupedLinear::Desc& desc, ops::GroupedLinear::Args& args) {
  const int64_t num_sizes = desc.num_groups + (desc.layout == ops::RowLayout::kContiguous ? 1 : 0);
  stage.add(args.x, Access::kInput);
  stage.add(args.sizes, num_sizes * 4, Access::kInput);
  stage.add(args.weights, desc.num_groups);
  stage.add(args.out, Access::kOutput);
}

}  // namespace tessera::verify
