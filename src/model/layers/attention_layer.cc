// SPDX-License-Identifier: Apache-2.0
#include "model/layers/attention_layer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

namespace tessera::model {

AttentionLayer::AttentionLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool with_entries)
    : prefix_(prefix), ratio_(ratio), window_slots_(builder.window_slots), with_entries_(with_entries) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  frequencies_ = builder.place(ratio == 0 ? ops::rope_frequencies(c.rope_dim, c.rope_theta, nullptr)
                                          : ops::rope_frequencies(c.rope_dim, c.compress_rope_theta, &c.yarn));
  wq_a_ = LinearLayer(builder, prefix + "wq_a", InputRole::kQuantised, activation);
  wq_b_ = LinearLayer(builder, prefix + "wq_b", InputRole::kQuantised, activation);
  wkv_ = LinearLayer(builder, prefix + "wkv", InputRole::kQuantised, activation);
  // Heads and groups of this rank, from the weights' slices.
  const int64_t heads = wq_b_.out_features() / c.head_dim;
  const int64_t groups = heads / c.heads_per_group();
  wo_a_ = LinearLayer(builder, prefix + "wo_a", InputRole::kGrouped, activation, groups);
  head_sum_ = RankSum(builder, builder.weights.shard().attention == AttentionSplit::kByGroup);
  // What ranks add is rounded once, behind the sum.
  wo_b_ =
      LinearLayer(builder, prefix + "wo_b", InputRole::kQuantised, head_sum_.is_needed() ? DType::kF32 : activation);
  q_norm_ = NormLayer(builder, prefix + "q_norm", prefix + "q_norm.weight", c.q_lora_rank);
  query_steps_.norm.emplace(builder, prefix + "q_head_norm", "", c.head_dim);
  window_steps_.norm.emplace(builder, prefix + "kv_norm", prefix + "kv_norm.weight", c.head_dim);
  sink_ = builder.weights.load_vector(prefix + "attn_sink");
  const ops::Rope::Desc q_rope{.vectors = heads, .width = c.head_dim, .rope_dim = c.rope_dim, .activation = activation};
  ops::Rope::Desc out_rope = q_rope, kv_rope = q_rope;
  out_rope.is_inverse = true;
  kv_rope.vectors = 1;
  query_steps_.rope = builder.bind<ops::Rope>(prefix + "q_rope", q_rope);
  window_steps_.rope = builder.bind<ops::Rope>(prefix + "kv_rope", kv_rope);
  out_rope_ = builder.bind<ops::Rope>(prefix + "out_rope", out_rope);
  const ops::EntryLayout layout = ops::kv_entry_layout(builder.precision, c.head_dim, c.rope_dim);
  window_steps_.write =
      builder.bind<ops::CacheWrite>(prefix + "window_write", {.layout = layout, .activation = activation});
  query_steps_.rotated = prefix + "q", window_steps_.rotated = prefix + "kv";
  attention_ = builder.bind<ops::Attention>(
      prefix + "attention", {.heads = heads,
                             .head_dim = c.head_dim,
                             .window = c.sliding_window,
                             .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim))),
                             .layout = layout,
                             .activation = activation});
  attention_rope_ = builder.bind_fused<ops::AttentionRope>(
      prefix + "attend", {.attention = attention_.desc, .rope = out_rope}, {attention_.chosen(), out_rope_.chosen()});
  later_window_ = VectorGroup(builder, prefix + "later_window", {&window_steps_});
  if (ratio != 0) {
    compressor_ = CompressorLayer(builder, prefix + "compressor.", ratio, CompressorLayer::Kind::kMain);
  }
  const CompressorLayer &main = compressor_, &index = indexer_.compressor();
  if (ratio == 4) {
    indexer_ = IndexerLayer(builder, prefix + "indexer.", ratio);
    maps_of_x_ = LinearGroupLayer(
        builder, prefix + "maps_of_x",
        {&wq_a_, &wkv_, &main.wkv(), &main.wgate(), &index.wkv(), &index.wgate(), &indexer_.weights_proj()});
    maps_of_qr_ = LinearGroupLayer(builder, prefix + "maps_of_qr", {&wq_b_, &indexer_.wq_b()}, &q_norm_);
    vectors_ = VectorGroup(builder, prefix + "vectors",
                           {&query_steps_, &window_steps_, &main.steps(), &index.steps(), &indexer_.steps()});
  } else if (ratio != 0) {
    maps_of_x_ = LinearGroupLayer(builder, prefix + "maps_of_x", {&wq_a_, &wkv_, &main.wkv(), &main.wgate()});
    maps_of_qr_ = LinearGroupLayer(builder, prefix + "maps_of_qr", {&wq_b_}, &q_norm_);
    vectors_ = VectorGroup(builder, prefix + "vectors", {&query_steps_, &window_steps_, &main.steps()});
  } else {
    maps_of_x_ = LinearGroupLayer(builder, prefix + "maps_of_x", {&wq_a_, &wkv_});
    maps_of_qr_ = LinearGroupLayer(builder, prefix + "maps_of_qr", {&wq_b_}, &q_norm_);
    vectors_ = VectorGroup(builder, prefix + "vectors", {&query_steps_, &window_steps_});
  }
  const NormLayer* norm = maps_of_qr_.has_norm() ? nullptr : &q_norm_;
  if (ratio == 4) {
    pools_ = PoolGroup(builder, prefix + "pools", {&main, &index}, norm);
  } else if (ratio != 0) {
    pools_ = PoolGroup(builder, prefix + "pools", {&main}, norm);
  }
}

LayerCacheLayout AttentionLayer::cache_layout() const {
  LayerCacheLayout layout;
  layout.ratio = ratio_;
  layout.window = attention_.desc.window;
  layout.window_slots = window_slots_;
  layout.kv = window_steps_.write->desc.layout;
  if (ratio_ != 0) layout.compressor = compressor_.pool_desc();
  if (ratio_ == 4) {
    layout.has_indexer = true;
    layout.index = indexer_.compressor().entry_layout();
    layout.index_compressor = indexer_.compressor().pool_desc();
  }
  return layout;
}

AttentionLayer::Mapped AttentionLayer::run_maps(const StepContext& context, size_t layer, const TensorView& x) const {
  using Call = LinearGroupLayer::Call;
  const auto output_of = [&](const LinearLayer& map) { return map.take_output(context); };
  Mapped mapped;
  mapped.qr = output_of(wq_a_), mapped.kv = output_of(wkv_), mapped.q = output_of(wq_b_);
  std::array<Call, 7> of_x{{{&wq_a_, mapped.qr}, {&wkv_, mapped.kv}}};
  std::array<Call, 2> of_qr{{{&wq_b_, mapped.q}}};
  std::array<PoolGroup::Call, ops::PoolNorm::kMostPools> pools;
  size_t num_of_x = 2, num_of_qr = 1, num_pools = 0;
  // Where its entries will be.
  const auto add_compressor = [&](const CompressorLayer& compressor) {
    const TensorView values = output_of(compressor.wkv()), gates = output_of(compressor.wgate());
    of_x[num_of_x++] = {&compressor.wkv(), values};
    of_x[num_of_x++] = {&compressor.wgate(), gates};
    PoolGroup::Call& pool = pools[num_pools++];
    pool = {&compressor, compressor.take_pool_call(context, layer, values, gates)};
    return pool.args.entries;
  };
  if (ratio_ != 0) mapped.entries = add_compressor(compressor_);
  if (ratio_ == 4) {
    mapped.index_keys = add_compressor(indexer_.compressor());
    mapped.index_weights = output_of(indexer_.weights_proj());
    mapped.index_queries = output_of(indexer_.wq_b());
    of_x[num_of_x++] = {&indexer_.weights_proj(), mapped.index_weights};
    of_qr[num_of_qr++] = {&indexer_.wq_b(), mapped.index_queries};
  }
  maps_of_x_.run(context, x, std::span(of_x).first(num_of_x));
  const bool is_normed = pools_.run(context, std::span(pools).first(num_pools), q_norm_, mapped.qr);
  maps_of_qr_.run(context, mapped.qr, std::span(of_qr).first(num_of_qr), is_normed ? nullptr : &q_norm_);
  return mapped;
}

// A ring holds the windows of so many rows at once, whoever's they are.
AttentionLayer::RowRange AttentionLayer::first_rows(const StepContext& context) const {
  return {0, std::min(context.num_tokens(), window_slots_ - attention_.desc.window + 1)};
}

VectorSteps::Rows AttentionLayer::window_rows(const StepContext& context, size_t layer, const TensorView& kv,
                                              const RowRange& range) const {
  return {.x = rows_of(kv, range.begin, range.num_rows),
          .positions = context.batch.positions() + range.begin,
          .num_rows = range.num_rows,
          .slots = context.batch.window_slots() + range.begin,
          .cache = context.caches.states(StateId::kWindow, layer, context.batch.places() + range.begin)};
}

void AttentionLayer::finish_vectors(const StepContext& context, size_t layer, const Mapped& mapped) const {
  const int64_t n = context.num_tokens(), *positions = context.batch.positions();
  const RowRange range = first_rows(context);
  std::array<VectorGroup::Call, ops::NormRope::kMostSets> calls{
      {{&query_steps_, {.x = mapped.q, .positions = positions, .num_rows = n}},
       {&window_steps_, window_rows(context, layer, mapped.kv, range)}}};
  size_t num_calls = 2;
  VectorSteps::Rows entries, keys;
  if (ratio_ != 0) {
    entries = compressor_.entry_rows(context, layer, mapped.entries);
    calls[num_calls++] = {&compressor_.steps(), entries};
  }
  if (ratio_ == 4) {
    keys = indexer_.compressor().entry_rows(context, layer, mapped.index_keys);
    calls[num_calls++] = {&indexer_.compressor().steps(), keys};
    calls[num_calls++] = {&indexer_.steps(), {.x = mapped.index_queries, .positions = positions, .num_rows = n}};
  }
  vectors_.run(context, frequencies_.as<float>(), std::span(calls).first(num_calls));
  trace_window(context, layer, range);
  if (entries.num_rows > 0) compressor_.trace_entries(context, layer, entries.x);
  if (keys.num_rows > 0) indexer_.compressor().trace_entries(context, layer, keys.x);
}

void AttentionLayer::write_window(const StepContext& context, size_t layer, const TensorView& kv,
                                  const RowRange& range) const {
  const VectorGroup::Call call{&window_steps_, window_rows(context, layer, kv, range)};
  later_window_.run(context, frequencies_.as<float>(), std::span(&call, 1));
  trace_window(context, layer, range);
}

void AttentionLayer::trace_window(const StepContext& context, size_t layer, const RowRange& range) const {
  if (context.tracer == nullptr) return;
  const int64_t entry_bytes = window_steps_.write->desc.layout.entry_bytes();
  for (const SliceRows& slice : context.batch.slices()) {
    uint8_t* ring = context.caches.state(StateId::kWindow, layer, slice.place);
    const int64_t end = std::min(slice.first_row + slice.num_rows, range.begin + range.num_rows);
    for (int64_t row = std::max(slice.first_row, range.begin); row < end; ++row) {
      const int64_t slot = (slice.first_position + row - slice.first_row) % window_slots_;
      context.trace(prefix_, "window_entry_bytes", {ring + slot * entry_bytes, DType::kU8, {1, entry_bytes}});
    }
  }
}

void AttentionLayer::attend(const StepContext& context, size_t layer, const TensorView& q, const int32_t* selected,
                            const RowRange& range, const TensorView& out) const {
  const int64_t begin = range.begin;
  const int32_t* places = context.batch.places() + begin;
  ops::PagedEntries<const uint8_t> entries;
  if (with_entries_) entries = context.caches.entries(EntriesId::kEntries, layer, places);
  const int64_t stride = selected == nullptr ? 0 : indexer_.top_k();
  const ops::Attention::Args args{
      .q = rows_of(q, begin, range.num_rows),
      .positions = context.batch.positions() + begin,
      .window_cache = context.caches.states(StateId::kWindow, layer, places),
      .window_slots = window_slots_,
      .entry_cache = entries,
      .num_entries = ratio_ == 0 ? nullptr : context.batch.of_ratio(ratio_).attended + begin,
      .selected = selected == nullptr ? nullptr : selected + begin * stride,
      .selected_stride = stride,
      .sink = sink_.as<float>(),
      .out = rows_of(out, begin, range.num_rows),
      .num_tokens = range.num_rows,
      .workspace = context.workspace};
  if (rotates_in_attention(context)) {
    attention_rope_.run({.attention = args,
                         .frequencies = frequencies_.as<float>(),
                         .num_tokens = args.num_tokens,
                         .workspace = args.workspace},
                        context.queue);
  } else {
    attention_.run(args, context.queue);
  }
}

void AttentionLayer::run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& result,
                         bool leaves_sum) const {
  const int64_t n = context.num_tokens();
  const ArenaScope scope(context.arena);
  const Mapped mapped = run_maps(context, layer, x);
  // A token attends itself, and the entry that it completes: caches are written before scores and attention. Windows of
  // many rows take turns in the rings, each as long as a ring has room, with attention after each.
  finish_vectors(context, layer, mapped);
  const int32_t* selected = nullptr;
  if (ratio_ == 4) selected = indexer_.select(context, layer, mapped.index_queries, mapped.index_weights);

  const TensorView out = context.take(context.activation, mapped.q.shape);
  RowRange range = first_rows(context);
  attend(context, layer, mapped.q, selected, range, out);
  while (range.begin + range.num_rows < n) {
    range.begin += range.num_rows;
    range.num_rows = std::min(range.num_rows, n - range.begin);
    write_window(context, layer, mapped.kv, range);  // over entries that nobody needs any more
    attend(context, layer, mapped.q, selected, range, out);
  }
  if (!rotates_in_attention(context)) {
    context.trace(prefix_, "attention", out);
    out_rope_.run(
        {.x = out, .positions = context.batch.positions(), .frequencies = frequencies_.as<float>(), .num_tokens = n},
        context.queue);
  }
  context.trace(prefix_, "attention_unrotated", out);
  const TensorView low = wo_a_.run(context, out, n);
  if (head_sum_.is_needed() && !leaves_sum) {
    head_sum_.run(context, wo_b_.run(context, low, n), result);
  } else {
    wo_b_.run_into(context, low, result, n);
  }
}

}  // namespace tessera::model
