// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the sequences of one runner share: how their caches are laid out, in which memory they lie, and a table of where
// each begins, which the ops read. A sequence has a place in the table for as long as it lives.
#include <cstdint>
#include <vector>

#include "device/buffer.h"
#include "model/cache_spec.h"
#include "ops/cache_entry.h"
#include "ops/compressor/compressor.h"
#include "ops/sequence_bases.h"

namespace tessera::model {

// What one layer keeps; the same for every sequence of a model.
struct LayerCacheLayout {
  int64_t ratio = 0;         // 0: window only
  int64_t window_slots = 0;  // position p lies in slot p mod window_slots
  ops::EntryLayout kv;       // of window and compressed entries
  bool has_indexer = false;
  ops::EntryLayout index;
  ops::CompressorPool::Desc compressor, index_compressor;
};

struct CacheLayout {
  std::vector<LayerCacheLayout> layers;  // main layers, then the draft block's
  int num_draft_layers = 0;
  uint64_t fingerprint = 0;  // of model, weights and precision: what save() and restore() compare
};

CacheSpec make_cache_spec(const CacheLayout& layout);

// The bytes of one layer of one sequence.
struct LayerCaches {
  device::Buffer window, entries, index_keys, compressor, index_compressor;
};

enum class CacheId { kWindow, kEntries, kIndexKeys, kCompressor, kIndexCompressor };
constexpr size_t kNumCacheIds = 5;

class CachePool {
 public:
  // Memory must outlive the pool, and the pool its sequences.
  CachePool(CacheLayout layout, device::MemorySpace& memory);

  const CacheLayout& layout() const { return layout_; }
  device::MemorySpace& memory() const { return memory_; }

  // The place of a sequence with these caches. Place 0 belongs to nobody: rows that only fill a recorded batch up have
  // it, and its caches are a window ring.
  int32_t add(const std::vector<LayerCaches>& layers);
  void remove(int32_t place) noexcept;

  // Where the caches of the rows' sequences begin; `places` [rows] lies in memory().
  ops::SequenceBases<uint8_t> bases(CacheId id, size_t layer, const int32_t* places) const;
  // The address (in memory()) of one of them.
  void* base(CacheId id, size_t layer, int32_t place) const;
  // Changes when the table moves: what was recorded with addresses of it is void then.
  int64_t version() const { return version_; }

 private:
  size_t at(CacheId id, size_t layer, size_t place) const {
    return (layer * kNumCacheIds + static_cast<size_t>(id)) * capacity_ + place;
  }
  void grow(size_t capacity);

  CacheLayout layout_;
  device::MemorySpace& memory_;
  size_t capacity_ = 0;                 // places that the table has
  std::vector<void*> table_;            // [layers][kNumCacheIds][capacity]
  std::vector<int32_t> free_;           // places
  device::Buffer placed_;               // the table in memory_, where that is not the host's
  std::vector<device::Buffer> nobody_;  // the rings of place 0
  int64_t version_ = 0;
};

}  // namespace tessera::model
