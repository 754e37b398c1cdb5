// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the sequences of one runner share: how their caches are laid out, in which memory they lie, the pages of those
// that grow (decision 0021), and tables of where each begins, which the ops read. A sequence has a place in the tables
// for as long as it lives.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "device/buffer.h"
#include "model/cache_spec.h"
#include "model/page_pool.h"
#include "ops/cache_entry.h"
#include "ops/compressor/compressor.h"
#include "ops/paged_entries.h"

namespace tessera::model {

struct SliceRows;

// What one layer keeps; the same for every sequence of a model.
struct LayerCacheLayout {
  int64_t ratio = 0;         // 0: window only
  int64_t window = 0;        // tokens that a token attends in the ring, itself included
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
  // The same, without the rings' size, which a snapshot does not depend on.
  uint64_t snapshot_fingerprint = 0;
};

// `ranks` > 1: so many have one copy of the compressed entries among them (PageShape::sharded).
CacheSpec make_cache_spec(const CacheLayout& layout, int64_t ranks = 1);

// Caches of fixed size, in a block of their own for each sequence: rings, then the compressors' states.
enum class StateId { kWindow, kCompressor, kIndexCompressor };
constexpr size_t kNumStateIds = 3;
// Caches that grow, in pages.
enum class EntriesId { kEntries, kIndexKeys };
constexpr size_t kNumEntriesIds = 2;

class CachePool {
 public:
  // Memory must outlive the pool, and the pool its sequences. `ranks`, with the queue of their collectives: they have
  // one copy of the compressed entries among them (PagePool). Index keys, every one of
  // which a token's choice looks at, and what does not grow are on every rank.
  CachePool(CacheLayout layout, device::MemorySpace& memory, comm::Communicator* ranks = nullptr,
            device::Queue* queue = nullptr);

  const CacheLayout& layout() const { return layout_; }
  device::MemorySpace& memory() const { return memory_; }
  PagePool& pages() { return pages_; }
  const PagePool& pages() const { return pages_; }

  // A block as it is at a sequence's start, and what of it is which cache; empty where a layer has no such cache.
  device::Buffer make_block() const;
  std::span<uint8_t> state(const device::Buffer& block, StateId id, size_t layer) const;
  // All compressors' states of it.
  std::span<uint8_t> compressor_states(const device::Buffer& block) const;
  // Pages that hold the entries of `tokens` tokens.
  int64_t pages_for(int64_t tokens) const;
  // Positions of a layer whose ring entries the next token attends, the last one excluded.
  std::pair<int64_t, int64_t> attended(size_t layer, int64_t position, int64_t draft_position) const;
  // Bytes of a snapshot there, besides its pages.
  size_t snapshot_bytes(int64_t position, int64_t draft_position) const;
  // Zeroes what of a page, copied to the host, is no entry of its first `num_tokens` tokens. Of a pool that is one
  // rank's.
  void clear_unfilled(std::span<uint8_t> page, int64_t num_tokens) const;

  // The place of a sequence with this block, and with room for `max_pages` pages. Place 0 belongs to nobody: rows that
  // only fill a recorded batch up have it, and its caches are a window ring.
  int32_t add(const device::Buffer& block, int64_t max_pages);
  void remove(int32_t place) noexcept;
  // Its pages from the first-th on are these now.
  void set_pages(int32_t place, int64_t first, std::span<const int32_t> pages);

  // Where the caches of the rows' sequences lie; `places` [rows] lies in memory(). No entries where the layer has none.
  ops::SequenceBases<uint8_t> states(StateId id, size_t layer, const int32_t* places) const;
  ops::PagedEntries<uint8_t> entries(EntriesId id, size_t layer, const int32_t* places) const;
  // The entries of the slices' sequences in that layer, for attention by rows of whose `places` these are. Of a pool
  // whose entries are sharded those are copied to this rank first that are read more often than a copy costs: of a
  // step's rows [first_row, end_row) attend here, each at most `most_attended`. Not for what is recorded; valid until
  // the next call.
  ops::PagedEntries<uint8_t> near_entries(size_t layer, std::span<const SliceRows> slices, int64_t first_row,
                                          int64_t end_row, int64_t most_attended, const int32_t* places,
                                          device::Queue& queue) const;
  // Room for that, of sequences of up to so many tokens. What was recorded stays as it is.
  void reserve_near(int64_t tokens);
  // Bytes of it; for layers of this ratio, which is not 0.
  int64_t near_bytes(int64_t tokens) const;
  static int64_t near_bytes(int64_t ratio, int64_t entry_bytes, int64_t tokens);
  // Those of one of them, for the host: addresses are of memory().
  uint8_t* state(StateId id, size_t layer, int32_t place) const;
  ops::SequenceEntries<uint8_t> entries(EntriesId id, size_t layer, int32_t place) const;
  // Changes when a table moves: what was recorded with addresses of it is void then.
  int64_t version() const { return version_; }

 private:
  // Bytes of a block, or of a page.
  struct Part {
    size_t offset = 0, bytes = 0;
    int shift = 0;  // of a page: log2 of the entries
  };
  size_t row(StateId id, size_t layer) const { return layer * kNumStateIds + static_cast<size_t>(id); }
  const Part& part(EntriesId id, size_t layer) const {
    return page_parts_[layer * kNumEntriesIds + static_cast<size_t>(id)];
  }
  PageShape lay_out(bool are_entries_sharded);
  // The table of pages' parts in which a cache lies.
  size_t table_of(EntriesId id) const { return pages_.is_sharded() && id == EntriesId::kIndexKeys ? 1 : 0; }
  uint8_t* const* page_table(EntriesId id) const { return page_table_.data() + table_of(id) * capacity_ * stride_; }
  void grow(size_t capacity, size_t stride);

  CacheLayout layout_;
  device::MemorySpace& memory_;
  std::vector<Part> block_parts_, page_parts_;  // [layers][kNumStateIds], [layers][kNumEntriesIds]
  size_t block_bytes_ = 0, states_begin_ = 0;   // where the compressors' states begin
  std::vector<uint8_t> first_states_;           // the compressors', at a sequence's start
  PagePool pages_;
  size_t capacity_ = 0, stride_ = 0;  // places that the tables have, and pages of each
  // [layers][kNumStateIds][capacity]; [tables][capacity][stride]: of sharded parts, then of own ones, or of whole
  // pages.
  std::vector<uint8_t*> states_, page_table_;
  std::vector<int32_t> free_;                    // places
  device::Buffer placed_states_, placed_pages_;  // the tables in memory_, where that is not the host's
  device::Buffer near_, near_table_;             // copies of other ranks' entries; a table of their own
  std::vector<device::Buffer> nobody_;           // the rings of place 0
  int64_t version_ = 0;
};

}  // namespace tessera::model
