// SPDX-License-Identifier: Apache-2.0
#include "model/layers/compressor_layer.h"

namespace tessera::model {

CompressorLayer::CompressorLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, Kind kind)
    : prefix_(prefix), kind_(kind) {
  const Config& c = builder.config;
  const int64_t width = kind == Kind::kMain ? c.head_dim : c.index_head_dim;
  wkv_ = LinearLayer(builder, prefix + "wkv", InputRole::kPlain, DType::kF32);
  wgate_ = LinearLayer(builder, prefix + "wgate", InputRole::kPlain, DType::kF32);
  ape_ = builder.weights.load_vector(prefix + "ape");
  steps_.norm.emplace(builder, prefix + "norm", prefix + "norm.weight", width);
  pool_ = builder.bind<ops::CompressorPool>(prefix + "pool",
                                            {.ratio = ratio, .width = width, .activation = builder.activation()});
  steps_.rope = builder.bind<ops::Rope>(
      prefix + "rope", {.vectors = 1, .width = width, .rope_dim = c.rope_dim, .activation = builder.activation()});
  const ops::EntryLayout layout = kind == Kind::kMain ? ops::kv_entry_layout(builder.precision, width, c.rope_dim)
                                                      : ops::index_entry_layout(builder.precision, width);
  if (kind == Kind::kIndex && builder.precision.cache == ops::CacheMode::kFp8) {
    steps_.hadamard =
        builder.bind<ops::Hadamard>(prefix + "hadamard", {.width = width, .activation = builder.activation()});
  }
  steps_.write =
      builder.bind<ops::CacheWrite>(prefix + "write", {.layout = layout, .activation = builder.activation()});
}

ops::CompressorPool::Args CompressorLayer::take_pool_call(const StepContext& context, size_t layer,
                                                          const TensorView& values, const TensorView& gates) const {
  const RatioRows& rows = context.batch.of_ratio(pool_.desc.ratio);
  const auto state =
      context.caches.states(kind_ == Kind::kMain ? StateId::kCompressor : StateId::kIndexCompressor, layer, nullptr);
  return {.values = values.as<float>(),
          .gates = gates.as<float>(),
          .ape = ape_.as<float>(),
          .state = {reinterpret_cast<float* const*>(state.all), nullptr},
          .slices = rows.slices,
          .num_slices = context.batch.num_slices(),
          .entries = context.take(context.activation, {rows.num_entries, pool_.desc.width})};
}

VectorSteps::Rows CompressorLayer::entry_rows(const StepContext& context, size_t layer,
                                              const TensorView& entries) const {
  const RatioRows& rows = context.batch.of_ratio(pool_.desc.ratio);
  // A recorded step goes on whatever the positions are, over rows that nobody stores.
  const bool has_rows = rows.num_completed > 0 || context.is_recorded;
  return {.x = entries,
          .positions = rows.entry_positions,
          .num_rows = has_rows ? rows.num_entries : 0,
          .slots = rows.entry_slots,
          .cache = context.caches.entries(cache(), layer, rows.entry_places)};
}

void CompressorLayer::trace_entries(const StepContext& context, size_t layer, const TensorView& entries) const {
  if (context.tracer == nullptr) return;
  const int64_t ratio = pool_.desc.ratio, entry_bytes = entry_layout().entry_bytes();
  int64_t row = 0;
  for (const SliceRows& slice : context.batch.slices()) {
    const int64_t count = ops::entries_completed(ratio, slice.first_position, slice.num_rows);
    const int64_t first_entry = slice.first_position / ratio;
    if (count > 0) {
      context.trace(prefix_, "entries", rows_of(entries, row, count));
      const device::Tensor bytes(DType::kU8, {count, entry_bytes});
      ops::for_each_run(context.caches.entries(cache(), layer, slice.place), first_entry, first_entry + count,
                        entry_bytes, [&](const uint8_t* data, int64_t first, int64_t num) {
                          context.caches.memory().download(bytes.as<uint8_t>() + (first - first_entry) * entry_bytes,
                                                           data, static_cast<size_t>(num * entry_bytes));
                        });
      context.tracer->tensor(prefix_ + "entry_bytes", bytes);
    }
    row += ops::most_completed(ratio, slice.num_rows);
  }
}

}  // namespace tessera::model
