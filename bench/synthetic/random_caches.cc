// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic/random_caches.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/rng.h"
#include "device/queue.h"
#include "model/sequence_caches.h"

namespace tessera::bench {

namespace {

model::SequenceCaches& caches_of(model::SequenceState& state) {
  auto* caches = dynamic_cast<model::SequenceCaches*>(&state);
  TESSERA_CHECK(caches != nullptr, "a sequence of model::Model");
  return *caches;
}

constexpr int64_t kRun = 1024;  // entries of one generator, so that threads share the many of a long context

std::vector<uint8_t> random_entries(uint64_t seed, const ops::EntryLayout& layout, int64_t count,
                                    device::Queue& threads) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count * layout.entry_bytes()));
  threads.parallel_for(ceil_div(count, kRun), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(layout.width));
    for (int64_t run = begin; run < end; ++run) {
      Rng rng(seed, static_cast<uint64_t>(run));
      for (int64_t i = run * kRun; i < std::min(count, (run + 1) * kRun); ++i) {
        for (float& value : values) value = rng.normal();
        ops::encode_entry(layout, values.data(), bytes.data() + i * layout.entry_bytes());
      }
    }
  });
  return bytes;
}

void fill_entries(Rng& rng, const ops::EntryLayout& layout, int64_t count, device::Queue& threads,
                  device::MemorySpace& memory, const ops::SequenceEntries<uint8_t>& cache) {
  const std::vector<uint8_t> bytes = random_entries(rng.next_u64(), layout, count, threads);
  const int64_t entry_bytes = layout.entry_bytes();
  ops::for_each_run(cache, 0, count, entry_bytes, [&](uint8_t* data, int64_t first, int64_t num) {
    memory.upload(data, bytes.data() + first * entry_bytes, static_cast<size_t>(num * entry_bytes));
  });
}

// CSA keeps the last window's rows. HCA, between two windows, is as at the start.
void fill_compressor(Rng& rng, const ops::CompressorPool::Desc& desc, device::MemorySpace& memory,
                     std::span<uint8_t> state) {
  if (desc.ratio != 4) return;
  std::vector<float> values(static_cast<size_t>(desc.state_floats()));
  for (float& value : values) value = rng.normal();
  memory.upload(state.data(), values.data(), state.size());
}

}  // namespace

void fill_caches(model::SequenceState& state, int64_t position, uint64_t seed, int num_threads) {
  model::SequenceCaches& caches = caches_of(state);
  TESSERA_CHECK(caches.position() == 0 && position % 128 == 0 && position <= caches.capacity(),
                fmt::format("position {} of {}", position, caches.capacity()));
  caches.make_room(0, position);
  device::MemorySpace& memory = caches.pool().memory();
  device::Queue threads(num_threads);
  for (size_t i = 0; i < caches.pool().layout().layers.size(); ++i) {
    const model::LayerCacheLayout& layout = caches.pool().layout().layers[i];
    Rng rng(seed, i + 1);
    fill_entries(rng, layout.kv, layout.window_slots, threads, memory,
                 {caches.state(model::StateId::kWindow, i).data()});
    if (layout.ratio == 0) continue;
    fill_entries(rng, layout.kv, position / layout.ratio, threads, memory,
                 caches.entries(model::EntriesId::kEntries, i));
    fill_compressor(rng, layout.compressor, memory, caches.state(model::StateId::kCompressor, i));
    if (!layout.has_indexer) continue;
    fill_entries(rng, layout.index, position / layout.ratio, threads, memory,
                 caches.entries(model::EntriesId::kIndexKeys, i));
    fill_compressor(rng, layout.index_compressor, memory, caches.state(model::StateId::kIndexCompressor, i));
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
