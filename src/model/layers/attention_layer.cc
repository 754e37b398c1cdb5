// SPDX-License-Identifier: Apache-2.0
#include "model/layers/attention_layer.h"

#include <cmath>

namespace tessera::model {

AttentionLayer::AttentionLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool with_entries)
    : prefix_(prefix), ratio_(ratio), window_slots_(builder.window_slots), with_entries_(with_entries) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  frequencies_ = std::make_unique<device::Tensor>(
      builder.place(ratio == 0 ? ops::rope_frequencies(c.rope_dim, c.rope_theta, nullptr)
                               : ops::rope_frequencies(c.rope_dim, c.compress_rope_theta, &c.yarn)));
  wq_a_ = LinearLayer(builder, prefix + "wq_a", InputRole::kQuantised, activation);
  wq_b_ = LinearLayer(builder, prefix + "wq_b", InputRole::kQuantised, activation);
  wkv_ = LinearLayer(builder, prefix + "wkv", InputRole::kQuantised, activation);
  // Heads and groups of this rank, from the weights' slices.
  const int64_t heads = wq_b_.out_features() / c.head_dim;
  const int64_t groups = heads / c.heads_per_group();
  wo_a_ = LinearLayer(builder, prefix + "wo_a", InputRole::kGrouped, activation, groups);
  wo_b_ = LinearLayer(builder, prefix + "wo_b", InputRole::kQuantised, activation);
  q_norm_ = NormLayer(builder, prefix + "q_norm", prefix + "q_norm.weight", c.q_lora_rank);
  q_head_norm_ = NormLayer(builder, prefix + "q_head_norm", "", c.head_dim);
  kv_norm_ = NormLayer(builder, prefix + "kv_norm", prefix + "kv_norm.weight", c.head_dim);
  sink_ = builder.weights.load_vector(prefix + "attn_sink");
  const ops::Rope::Desc q_rope{.vectors = heads, .width = c.head_dim, .rope_dim = c.rope_dim, .activation = activation};
  ops::Rope::Desc out_rope = q_rope, kv_rope = q_rope;
  out_rope.is_inverse = true;
  kv_rope.vectors = 1;
  q_rope_ = builder.bind<ops::Rope>(prefix + "q_rope", q_rope);
  kv_rope_ = builder.bind<ops::Rope>(prefix + "kv_rope", kv_rope);
  out_rope_ = builder.bind<ops::Rope>(prefix + "out_rope", out_rope);
  const ops::EntryLayout layout = ops::kv_entry_layout(builder.precision, c.head_dim, c.rope_dim);
  write_ = builder.bind<ops::CacheWrite>(prefix + "window_write", {.layout = layout, .activation = activation});
  attention_ = builder.bind<ops::Attention>(
      prefix + "attention", {.heads = heads,
                             .head_dim = c.head_dim,
                             .window = c.sliding_window,
                             .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim))),
                             .layout = layout,
                             .activation = activation});
  if (ratio != 0) {
    compressor_ = CompressorLayer(builder, prefix + "compressor.", ratio, CompressorLayer::Kind::kMain, *frequencies_);
  }
  if (ratio == 4) indexer_ = IndexerLayer(builder, prefix + "indexer.", ratio, *frequencies_);
}

LayerCacheLayout AttentionLayer::cache_layout() const {
  LayerCacheLayout layout;
  layout.ratio = ratio_;
  layout.window = attention_.desc.window;
  layout.window_slots = window_slots_;
  layout.kv = write_.desc.layout;
  if (ratio_ != 0) layout.compressor = compressor_.pool_desc();
  if (ratio_ == 4) {
    layout.has_indexer = true;
    layout.index = indexer_.compressor().entry_layout();
    layout.index_compressor = indexer_.compressor().pool_desc();
  }
  return layout;
}

TensorView AttentionLayer::make_queries(const StepContext& context, const TensorView& x, TensorView& qr) const {
  const int64_t n = context.num_tokens();
  qr = wq_a_.run(context, x, n);
  q_norm_.run(context, qr, qr, n);
  const TensorView q = wq_b_.run(context, qr, n);
  q_head_norm_.run(context, q, q, n * attention_.desc.heads);
  q_rope_.run(
      {.x = q, .positions = context.batch.positions(), .frequencies = frequencies_->as<float>(), .num_tokens = n},
      context.queue);
  context.trace(prefix_, "q", q);
  return q;
}

void AttentionLayer::write_window(const StepContext& context, size_t layer, const TensorView& x) const {
  const ArenaScope scope(context.arena);
  const int64_t n = context.num_tokens(), entry_bytes = write_.desc.layout.entry_bytes();
  const TensorView kv = wkv_.run(context, x, n);
  kv_norm_.run(context, kv, kv, n);
  kv_rope_.run(
      {.x = kv, .positions = context.batch.positions(), .frequencies = frequencies_->as<float>(), .num_tokens = n},
      context.queue);
  context.trace(prefix_, "kv", kv);
  write_.run({.rows = kv,
              .slots = context.batch.window_slots(),
              .cache = context.caches.states(StateId::kWindow, layer, context.batch.places()),
              .num_rows = n},
             context.queue);
  if (context.tracer == nullptr) return;
  for (const SliceRows& slice : context.batch.slices()) {
    uint8_t* ring = context.caches.state(StateId::kWindow, layer, slice.place);
    for (int64_t i = 0; i < slice.num_rows; ++i) {
      const int64_t slot = (slice.first_position + i) % window_slots_;
      context.trace(prefix_, "window_entry_bytes", {ring + slot * entry_bytes, DType::kU8, {1, entry_bytes}});
    }
  }
}

TensorView AttentionLayer::run(const StepContext& context, size_t layer, const TensorView& x) const {
  const int64_t n = context.num_tokens();
  const TensorView result = context.take_rows(wo_b_.out_features());
  const ArenaScope scope(context.arena);
  TensorView qr;
  const TensorView q = make_queries(context, x, qr);
  write_window(context, layer, x);
  // A token that completes a window may attend its entry, so entries come before scores and attention.
  const int32_t *counts = nullptr, *selected = nullptr;
  if (ratio_ != 0) {
    compressor_.run(context, layer, x);
    counts = context.batch.of_ratio(ratio_).attended;
  }
  if (ratio_ == 4) selected = indexer_.run(context, layer, x, qr);

  const TensorView out = context.take(context.activation, q.shape);
  ops::PagedEntries<const uint8_t> entries;
  if (with_entries_) entries = context.caches.entries(EntriesId::kEntries, layer, context.batch.places());
  attention_.run({.q = q,
                  .positions = context.batch.positions(),
                  .window_cache = context.caches.states(StateId::kWindow, layer, context.batch.places()),
                  .window_slots = window_slots_,
                  .entry_cache = entries,
                  .num_entries = counts,
                  .selected = selected,
                  .selected_stride = selected == nullptr ? 0 : indexer_.top_k(),
                  .sink = sink_.as<float>(),
                  .out = out,
                  .num_tokens = n,
                  .workspace = context.workspace},
                 context.queue);
  context.trace(prefix_, "attention", out);
  out_rope_.run(
      {.x = out, .positions = context.batch.positions(), .frequencies = frequencies_->as<float>(), .num_tokens = n},
      context.queue);
  context.trace(prefix_, "attention_unrotated", out);
  const TensorView low = wo_a_.run(context, out, n);
  wo_b_.run_into(context, low, result, n);
  return result;
}

}  // namespace tessera::model
