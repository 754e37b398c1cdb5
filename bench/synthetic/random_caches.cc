// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic/random_caches.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "model/sequence_caches.h"

namespace tessera::bench {

namespace {

model::SequenceCaches& caches_of(model::SequenceState& state) {
  auto* caches = dynamic_cast<model::SequenceCaches*>(&state);
  TESSERA_CHECK(caches != nullptr, "a sequence of model::Model");
  return *caches;
}

void fill_entries(Rng& rng, const ops::EntryLayout& layout, int64_t count, const device::Buffer& cache) {
  std::vector<float> values(static_cast<size_t>(layout.width));
  std::vector<uint8_t> bytes(static_cast<size_t>(count * layout.entry_bytes()));
  for (int64_t i = 0; i < count; ++i) {
    for (float& value : values) value = rng.normal();
    ops::encode_entry(layout, values.data(), bytes.data() + i * layout.entry_bytes());
  }
  cache.memory().upload(cache.data(), bytes.data(), bytes.size());
}

// CSA keeps the last window's rows. HCA, between two windows, is as at the start.
void fill_compressor(Rng& rng, const ops::CompressorPool::Desc& desc, const device::Buffer& state) {
  if (desc.ratio != 4) return;
  std::vector<float> values(static_cast<size_t>(desc.state_floats()));
  for (float& value : values) value = rng.normal();
  state.memory().upload(state.data(), values.data(), state.size());
}

}  // namespace

void fill_caches(model::SequenceState& state, int64_t position, uint64_t seed) {
  model::SequenceCaches& caches = caches_of(state);
  TESSERA_CHECK(caches.position() == 0 && position % 128 == 0 && position <= caches.capacity(),
                fmt::format("position {} of {}", position, caches.capacity()));
  for (size_t i = 0; i < caches.pool().layout().layers.size(); ++i) {
    const model::LayerCacheLayout& layout = caches.pool().layout().layers[i];
    const model::LayerCaches& layer = caches.layer(i);
    Rng rng(seed, i + 1);
    fill_entries(rng, layout.kv, layout.window_slots, layer.window);
    if (layout.ratio == 0) continue;
    fill_entries(rng, layout.kv, position / layout.ratio, layer.entries);
    fill_compressor(rng, layout.compressor, layer.compressor);
    if (!layout.has_indexer) continue;
    fill_entries(rng, layout.index, position / layout.ratio, layer.index_keys);
    fill_compressor(rng, layout.index_compressor, layer.index_compressor);
  }
  caches.advance(position);
}

int64_t cache_bytes_read(model::SequenceState& state, size_t layer, const model::Config& config, int64_t tokens) {
  const model::SequenceCaches& caches = caches_of(state);
  const model::LayerCacheLayout& layout = caches.pool().layout().layers[layer];
  const int64_t position = caches.position() + tokens - 1;
  int64_t keys = std::min(position + 1, config.sliding_window + tokens - 1), bytes = 0;
  if (layout.ratio != 0) {
    const int64_t entries = position / layout.ratio;
    keys += layout.has_indexer ? std::min(entries, tokens * config.index_topk) : entries;
    if (layout.has_indexer) bytes += entries * layout.index.entry_bytes();
  }
  return bytes + keys * layout.kv.entry_bytes();
}

}  // namespace tessera::bench
