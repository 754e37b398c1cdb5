// SPDX-License-Identifier: Apache-2.0
#include "model/layers/compressor_layer.h"

namespace tessera::model {

CompressorLayer::CompressorLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, Kind kind,
                                 const std::vector<float>& frequencies)
    : prefix_(prefix), kind_(kind), frequencies_(&frequencies) {
  const Config& c = builder.config;
  const int64_t width = kind == Kind::kMain ? c.head_dim : c.index_head_dim;
  wkv_ = LinearLayer(builder, prefix + "wkv", InputRole::kPlain, DType::kF32);
  wgate_ = LinearLayer(builder, prefix + "wgate", InputRole::kPlain, DType::kF32);
  ape_ = builder.weights.load_vector(prefix + "ape");
  norm_ = NormLayer(builder, prefix + "norm", prefix + "norm.weight", width);
  pool_ = builder.bind<ops::CompressorPool>(prefix + "pool",
                                            {.ratio = ratio, .width = width, .activation = builder.activation()});
  rope_ = builder.bind<ops::Rope>(
      prefix + "rope", {.vectors = 1, .width = width, .rope_dim = c.rope_dim, .activation = builder.activation()});
  const ops::EntryLayout layout = kind == Kind::kMain ? ops::kv_entry_layout(builder.precision, width, c.rope_dim)
                                                      : ops::index_entry_layout(builder.precision, width);
  has_hadamard_ = kind == Kind::kIndex && builder.precision.cache == ops::CacheMode::kFp8;
  if (has_hadamard_) {
    hadamard_ = builder.bind<ops::Hadamard>(prefix + "hadamard", {.width = width, .activation = builder.activation()});
  }
  write_ = builder.bind<ops::CacheWrite>(prefix + "write", {.layout = layout, .activation = builder.activation()});
}

void CompressorLayer::run(const StepContext& context, size_t layer, const TensorView& x) const {
  const ArenaScope scope(context.arena);
  const TensorView values = wkv_.run(context, x, context.num_tokens);
  const TensorView gates = wgate_.run(context, x, context.num_tokens);
  for (const SliceRows& slice : context.slices) run_slice(context, layer, slice, values, gates);
}

void CompressorLayer::run_slice(const StepContext& context, size_t layer, const SliceRows& slice,
                                const TensorView& values, const TensorView& gates) const {
  const ArenaScope scope(context.arena);
  const int64_t ratio = pool_.desc.ratio, width = pool_.desc.width;
  const int64_t first_entry = slice.first_position / ratio;
  const int64_t count = ops::entries_completed(ratio, slice.first_position, slice.num_rows);
  LayerCaches& caches = slice.state->layer(layer);
  const bool is_main = kind_ == Kind::kMain;
  const TensorView entries = context.take(context.activation, {count, width});
  pool_.run({.values = rows_of(values, slice.first_row, slice.num_rows).as<float>(),
             .gates = rows_of(gates, slice.first_row, slice.num_rows).as<float>(),
             .ape = ape_.as<float>(),
             .state = (is_main ? caches.compressor : caches.index_compressor).as<float>(),
             .first_position = slice.first_position,
             .num_tokens = slice.num_rows,
             .entries = entries},
            context.queue);
  if (count == 0) return;
  context.trace(prefix_, "pooled", entries);
  norm_.run(context, entries, entries, count);
  int64_t* positions = context.take(DType::kI64, {count}).as<int64_t>();
  int64_t* slots = context.take(DType::kI64, {count}).as<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    slots[i] = first_entry + i;
    positions[i] = slots[i] * ratio;  // of the window's first token
  }
  rope_.run({.x = entries, .positions = positions, .frequencies = frequencies_->data(), .num_tokens = count},
            context.queue);
  if (has_hadamard_) hadamard_.run({.x = entries, .num_rows = count}, context.queue);
  context.trace(prefix_, "entries", entries);
  const device::Buffer& cache = is_main ? caches.entries : caches.index_keys;
  write_.run({.rows = entries, .slots = slots, .cache = cache.as<uint8_t>(), .num_rows = count}, context.queue);
  const int64_t entry_bytes = write_.desc.layout.entry_bytes();
  context.trace(prefix_, "entry_bytes",
                {cache.as<uint8_t>() + first_entry * entry_bytes, DType::kU8, {count, entry_bytes}});
}

}  // namespace tessera::model
