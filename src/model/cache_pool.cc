// SPDX-License-Identifier: Apache-2.0
#include "model/cache_pool.h"

#include <fmt/format.h>

#include <utility>

namespace tessera::model {

CacheSpec make_cache_spec(const CacheLayout& layout) {
  CacheSpec spec;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerCacheLayout& layer = layout.layers[i];
    const size_t num_main = layout.layers.size() - static_cast<size_t>(layout.num_draft_layers);
    const std::string name = i < num_main ? fmt::format("layers.{}.", i) : fmt::format("mtp.{}.", i - num_main);
    spec.kinds.push_back({name + "window", layer.kv.entry_bytes(), layer.window_slots, 0});
    if (layer.ratio == 0) continue;
    spec.kinds.push_back({name + "entries", layer.kv.entry_bytes(), 0, layer.ratio});
    spec.kinds.push_back({name + "compressor", layer.compressor.state_floats() * 4, 1, 0});
    if (!layer.has_indexer) continue;
    spec.kinds.push_back({name + "index_keys", layer.index.entry_bytes(), 0, layer.ratio});
    spec.kinds.push_back({name + "index_compressor", layer.index_compressor.state_floats() * 4, 1, 0});
  }
  return spec;
}

CachePool::CachePool(CacheLayout layout, device::MemorySpace& memory) : layout_(std::move(layout)), memory_(memory) {
  constexpr size_t kFirstCapacity = 16;
  grow(kFirstCapacity);
  // An op reads one entry of a ring at position 0, whatever it holds.
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    nobody_.emplace_back(static_cast<size_t>(layout_.layers[i].kv.entry_bytes()), memory_);
    table_[at(CacheId::kWindow, i, 0)] = nobody_.back().data();
  }
}

void CachePool::grow(size_t capacity) {
  std::vector<void*> table(layout_.layers.size() * kNumCacheIds * capacity);
  for (size_t row = 0; row < layout_.layers.size() * kNumCacheIds; ++row) {
    for (size_t place = 0; place < capacity_; ++place) table[row * capacity + place] = table_[row * capacity_ + place];
  }
  if (!memory_.is_host()) placed_ = device::Buffer(table.size() * sizeof(void*), memory_);
  // Highest first, so that the lowest are given out first; place 0 is nobody's.
  for (size_t place = capacity; place-- > std::max<size_t>(capacity_, 1);) {
    free_.push_back(static_cast<int32_t>(place));
  }
  free_.reserve(capacity);  // remove() does not allocate
  table_ = std::move(table);
  capacity_ = capacity;
  ++version_;
}

int32_t CachePool::add(const std::vector<LayerCaches>& layers) {
  if (free_.empty()) grow(2 * capacity_);
  const int32_t place = free_.back();
  const size_t p = static_cast<size_t>(place);
  for (size_t i = 0; i < layers.size(); ++i) {
    table_[at(CacheId::kWindow, i, p)] = layers[i].window.data();
    table_[at(CacheId::kEntries, i, p)] = layers[i].entries.data();
    table_[at(CacheId::kIndexKeys, i, p)] = layers[i].index_keys.data();
    table_[at(CacheId::kCompressor, i, p)] = layers[i].compressor.data();
    table_[at(CacheId::kIndexCompressor, i, p)] = layers[i].index_compressor.data();
  }
  if (!memory_.is_host()) memory_.upload(placed_.data(), table_.data(), placed_.size());
  free_.pop_back();
  return place;
}

void CachePool::remove(int32_t place) noexcept {
  free_.push_back(place);
}

ops::SequenceBases<uint8_t> CachePool::bases(CacheId id, size_t layer, const int32_t* places) const {
  void* const* table = memory_.is_host() ? table_.data() : placed_.as<void*>();
  return {reinterpret_cast<uint8_t* const*>(table + at(id, layer, 0)), places};
}

void* CachePool::base(CacheId id, size_t layer, int32_t place) const {
  return table_[at(id, layer, static_cast<size_t>(place))];
}

}  // namespace tessera::model
