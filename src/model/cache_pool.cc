// SPDX-License-Identifier: Apache-2.0
#include "model/cache_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"
#include "comm/near_pages.h"
#include "model/step_batch.h"

namespace tessera::model {

namespace {

// Caches begin in a page at multiples of this: what kernels load at once.
constexpr size_t kPartAlignment = 16;

int64_t page_bytes_of(const CacheSpec& spec) {
  int64_t own = 0, sharded = 0, ranks = 1;
  for (const CacheKind& kind : spec.kinds) {
    if (kind.ratio == 0) continue;
    (kind.ranks > 1 ? sharded : own) += round_up<int64_t>(kPageTokens / kind.ratio * kind.entry_bytes, kPartAlignment);
    ranks = std::max(ranks, kind.ranks);
  }
  return own + ceil_div(sharded, ranks);
}

}  // namespace

CacheSpec make_cache_spec(const CacheLayout& layout, int64_t ranks) {
  CacheSpec spec;
  spec.page_tokens = kPageTokens;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerCacheLayout& layer = layout.layers[i];
    const size_t num_main = layout.layers.size() - static_cast<size_t>(layout.num_draft_layers);
    const std::string name = i < num_main ? fmt::format("layers.{}.", i) : fmt::format("mtp.{}.", i - num_main);
    spec.kinds.push_back({name + "window", layer.kv.entry_bytes(), layer.window_slots, 0});
    if (layer.ratio == 0) continue;
    spec.kinds.push_back({name + "entries", layer.kv.entry_bytes(), 0, layer.ratio, ranks});
    spec.kinds.push_back({name + "compressor", layer.compressor.state_floats() * 4, 1, 0});
    if (!layer.has_indexer) continue;
    spec.kinds.push_back({name + "index_keys", layer.index.entry_bytes(), 0, layer.ratio});
    spec.kinds.push_back({name + "index_compressor", layer.index_compressor.state_floats() * 4, 1, 0});
  }
  spec.page_bytes = page_bytes_of(spec);
  for (const LayerCacheLayout& layer : layout.layers) {
    spec.snapshot_bytes += (layer.window - 1) * layer.kv.entry_bytes();
    for (const auto& [has, desc] :
         {std::pair(layer.ratio != 0, layer.compressor), std::pair(layer.has_indexer, layer.index_compressor)}) {
      if (has) spec.snapshot_bytes += round_up<int64_t>(desc.state_floats() * 4, device::kBufferAlignment);
    }
  }
  return spec;
}

CachePool::CachePool(CacheLayout layout, device::MemorySpace& memory, comm::Communicator* ranks, device::Queue* queue)
    : layout_(std::move(layout)), memory_(memory), pages_(lay_out(ranks != nullptr), memory, ranks, queue) {
  constexpr size_t kFirstCapacity = 16, kFirstStride = 16;
  grow(kFirstCapacity, kFirstStride);
  // An op reads one entry of a ring at position 0, whatever it holds.
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    nobody_.emplace_back(static_cast<size_t>(layout_.layers[i].kv.entry_bytes()), memory_);
    states_[row(StateId::kWindow, i) * capacity_] = nobody_.back().as<uint8_t>();
  }
}

PageShape CachePool::lay_out(bool are_entries_sharded) {
  block_parts_.resize(layout_.layers.size() * kNumStateIds);
  page_parts_.resize(layout_.layers.size() * kNumEntriesIds);
  const auto take = [](size_t& used, int64_t bytes, size_t alignment) -> Part {
    const size_t begin = used;
    used = round_up(begin + static_cast<size_t>(bytes), alignment);
    return {begin, static_cast<size_t>(bytes), 0};
  };
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    const LayerCacheLayout& layer = layout_.layers[i];
    block_parts_[row(StateId::kWindow, i)] =
        take(block_bytes_, layer.window_slots * layer.kv.entry_bytes(), device::kBufferAlignment);
  }
  states_begin_ = block_bytes_;
  size_t own_bytes = 0, sharded_bytes = 0;
  const auto take_compressor = [&](StateId id, size_t i, const ops::CompressorPool::Desc& desc) {
    const Part part =
        take(block_bytes_, desc.state_floats() * static_cast<int64_t>(sizeof(float)), device::kBufferAlignment);
    block_parts_[row(id, i)] = part;
    first_states_.resize(block_bytes_ - states_begin_);
    std::vector<float> state(static_cast<size_t>(desc.state_floats()));
    ops::compressor_reset(desc, state.data());
    std::memcpy(first_states_.data() + part.offset - states_begin_, state.data(), part.bytes);
  };
  const auto take_entries = [&](EntriesId id, size_t i, const ops::EntryLayout& entry) {
    const int64_t count = kPageTokens / layout_.layers[i].ratio;
    TESSERA_CHECK(std::has_single_bit(static_cast<uint64_t>(count)) && count * layout_.layers[i].ratio == kPageTokens,
                  fmt::format("entries of {} tokens in pages of {}", layout_.layers[i].ratio, kPageTokens));
    const bool is_sharded = are_entries_sharded && id == EntriesId::kEntries;
    Part part = take(is_sharded ? sharded_bytes : own_bytes, count * entry.entry_bytes(), kPartAlignment);
    part.shift = std::countr_zero(static_cast<uint64_t>(count));
    page_parts_[i * kNumEntriesIds + static_cast<size_t>(id)] = part;
  };
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    const LayerCacheLayout& layer = layout_.layers[i];
    if (layer.ratio == 0) continue;
    take_compressor(StateId::kCompressor, i, layer.compressor);
    take_entries(EntriesId::kEntries, i, layer.kv);
    if (!layer.has_indexer) continue;
    take_compressor(StateId::kIndexCompressor, i, layer.index_compressor);
    take_entries(EntriesId::kIndexKeys, i, layer.index);
  }
  return {static_cast<int64_t>(own_bytes), static_cast<int64_t>(sharded_bytes)};
}

device::Buffer CachePool::make_block() const {
  device::Buffer block(block_bytes_, memory_);
  memory_.upload(block.as<uint8_t>() + states_begin_, first_states_.data(), first_states_.size());
  return block;
}

std::span<uint8_t> CachePool::state(const device::Buffer& block, StateId id, size_t layer) const {
  const Part& part = block_parts_[row(id, layer)];
  return {block.as<uint8_t>() + part.offset, part.bytes};
}

std::span<uint8_t> CachePool::compressor_states(const device::Buffer& block) const {
  return {block.as<uint8_t>() + states_begin_, block_bytes_ - states_begin_};
}

int64_t CachePool::pages_for(int64_t tokens) const {
  return pages_.shape().bytes() == 0 ? 0 : ceil_div(tokens, kPageTokens);
}

std::pair<int64_t, int64_t> CachePool::attended(size_t layer, int64_t position, int64_t draft_position) const {
  const bool is_draft = layer + static_cast<size_t>(layout_.num_draft_layers) >= layout_.layers.size();
  const int64_t end = is_draft ? draft_position : position;
  return {std::max<int64_t>(0, end - (layout_.layers[layer].window - 1)), end};
}

size_t CachePool::snapshot_bytes(int64_t position, int64_t draft_position) const {
  size_t bytes = block_bytes_ - states_begin_;
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    const auto [first, end] = attended(i, position, draft_position);
    bytes += static_cast<size_t>((end - first) * layout_.layers[i].kv.entry_bytes());
  }
  return bytes;
}

void CachePool::clear_unfilled(std::span<uint8_t> page, int64_t num_tokens) const {
  TESSERA_CHECK(!pages_.is_sharded(), "a page whose parts lie in one order");
  size_t end = 0;  // of what was looked at; parts lie in this order
  const auto clear_to = [&](size_t begin) {
    std::fill(page.begin() + static_cast<std::ptrdiff_t>(end), page.begin() + static_cast<std::ptrdiff_t>(begin),
              uint8_t{0});
  };
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    for (const EntriesId id : {EntriesId::kEntries, EntriesId::kIndexKeys}) {
      const Part& found = part(id, i);
      if (found.bytes == 0) continue;
      clear_to(found.offset);
      const size_t entry_bytes = found.bytes >> found.shift;
      end = found.offset + static_cast<size_t>(num_tokens / layout_.layers[i].ratio) * entry_bytes;
    }
  }
  clear_to(page.size());
}

// Nothing has changed where memory ends.
void CachePool::grow(size_t capacity, size_t stride) {
  const size_t rows = layout_.layers.size() * kNumStateIds, num_tables = pages_.is_sharded() ? 2 : 1;
  std::vector<uint8_t*> states(rows * capacity), page_table(num_tables * capacity * stride);
  for (size_t place = 0; place < capacity_; ++place) {
    for (size_t i = 0; i < rows; ++i) states[i * capacity + place] = states_[i * capacity_ + place];
    for (size_t table = 0; table < num_tables; ++table) {
      std::copy_n(page_table_.begin() + static_cast<std::ptrdiff_t>((table * capacity_ + place) * stride_), stride_,
                  page_table.begin() + static_cast<std::ptrdiff_t>((table * capacity + place) * stride));
    }
  }
  device::Buffer placed_states, placed_pages, near_table;
  if (pages_.is_sharded()) near_table = device::Buffer(capacity * stride * sizeof(void*), memory_);
  if (!memory_.is_host()) {
    placed_states = device::Buffer(states.size() * sizeof(void*), memory_);
    placed_pages = device::Buffer(page_table.size() * sizeof(void*), memory_);
    memory_.upload(placed_states.data(), states.data(), placed_states.size());
    memory_.upload(placed_pages.data(), page_table.data(), placed_pages.size());
  }
  free_.reserve(capacity);  // remove() does not allocate
  // Highest first, so that the lowest are given out first; place 0 is nobody's.
  for (size_t place = capacity; place-- > std::max<size_t>(capacity_, 1);) {
    free_.push_back(static_cast<int32_t>(place));
  }
  states_ = std::move(states), page_table_ = std::move(page_table);
  placed_states_ = std::move(placed_states), placed_pages_ = std::move(placed_pages);
  near_table_ = std::move(near_table);
  capacity_ = capacity, stride_ = stride;
  ++version_;
}

int32_t CachePool::add(const device::Buffer& block, int64_t max_pages) {
  const size_t capacity = free_.empty() ? 2 * capacity_ : capacity_;
  const size_t stride = std::max(stride_, std::bit_ceil(static_cast<size_t>(max_pages)));
  if (capacity != capacity_ || stride != stride_) grow(capacity, stride);
  const size_t place = static_cast<size_t>(free_.back());
  for (size_t i = 0; i < layout_.layers.size(); ++i) {
    for (const StateId id : {StateId::kWindow, StateId::kCompressor, StateId::kIndexCompressor}) {
      const std::span<uint8_t> found = state(block, id, i);
      states_[row(id, i) * capacity_ + place] = found.empty() ? nullptr : found.data();
    }
  }
  if (!memory_.is_host()) memory_.upload(placed_states_.data(), states_.data(), placed_states_.size());
  free_.pop_back();
  return static_cast<int32_t>(place);
}

void CachePool::remove(int32_t place) noexcept {
  free_.push_back(place);
}

void CachePool::set_pages(int32_t place, int64_t first, std::span<const int32_t> pages) {
  TESSERA_CHECK(static_cast<size_t>(first) + pages.size() <= stride_, "room in the table");
  const auto set = [&](EntriesId id, const auto& address) {
    const size_t at = (table_of(id) * capacity_ + static_cast<size_t>(place)) * stride_ + static_cast<size_t>(first);
    for (size_t i = 0; i < pages.size(); ++i) page_table_[at + i] = address(pages[i]);
    if (memory_.is_host() || pages.empty()) return;
    memory_.upload(placed_pages_.as<uint8_t*>() + at, page_table_.data() + at, pages.size() * sizeof(void*));
  };
  if (pages_.is_sharded()) set(EntriesId::kEntries, [&](int32_t page) { return pages_.sharded(page); });
  set(EntriesId::kIndexKeys, [&](int32_t page) { return pages_.own(page); });
}

ops::SequenceBases<uint8_t> CachePool::states(StateId id, size_t layer, const int32_t* places) const {
  uint8_t* const* table = memory_.is_host() ? states_.data() : placed_states_.as<uint8_t*>();
  return {table + row(id, layer) * capacity_, places};
}

ops::PagedEntries<uint8_t> CachePool::entries(EntriesId id, size_t layer, const int32_t* places) const {
  const Part& found = part(id, layer);
  if (found.bytes == 0) return {};
  uint8_t* const* table =
      memory_.is_host() ? page_table(id) : placed_pages_.as<uint8_t*>() + table_of(id) * capacity_ * stride_;
  ops::PagedEntries<uint8_t> entries(table, static_cast<int64_t>(stride_), places, static_cast<int64_t>(found.offset),
                                     found.shift);
  entries.has_far = id == EntriesId::kEntries && pages_.is_sharded();
  return entries;
}

int64_t CachePool::near_bytes(int64_t ratio, int64_t entry_bytes, int64_t tokens) {
  return round_up<int64_t>(kPageTokens / ratio * entry_bytes, kPartAlignment) * ceil_div(tokens, kPageTokens);
}

int64_t CachePool::near_bytes(int64_t tokens) const {
  int64_t bytes = 0;
  for (const LayerCacheLayout& layer : layout_.layers) {
    if (layer.ratio != 0) bytes = std::max(bytes, near_bytes(layer.ratio, layer.kv.entry_bytes(), tokens));
  }
  return bytes;
}

void CachePool::reserve_near(int64_t tokens) {
  if (!pages_.is_sharded()) return;
  const auto bytes = static_cast<size_t>(near_bytes(tokens));
  if (bytes > near_.size()) near_ = device::Buffer(bytes, memory_);
}

ops::PagedEntries<uint8_t> CachePool::near_entries(size_t layer, std::span<const SliceRows> slices, int64_t first_row,
                                                   int64_t end_row, int64_t most_attended, const int32_t* places,
                                                   device::Queue& queue) const {
  // Copying is a launch, and reads whole pages of what may be fewer entries.
  constexpr int64_t kFewestRows = 16, kFewestReads = 2;
  const ops::PagedEntries<uint8_t> far = entries(EntriesId::kEntries, layer, places);
  if (!pages_.is_sharded() || !far.exists()) return far;
  const Part& found = part(EntriesId::kEntries, layer);
  const auto part_bytes = static_cast<int64_t>(round_up(found.bytes, kPartAlignment));
  const auto room = static_cast<int64_t>(near_.size()) / part_bytes;
  std::vector<comm::NearSequence> sequences;
  int64_t used = 0;
  bool has_far = false;
  for (const SliceRows& slice : slices) {
    const int64_t tokens = slice.first_position + slice.num_rows, num_pages = pages_for(tokens);
    const int64_t rows = std::min(slice.first_row + slice.num_rows, end_row) - std::max(slice.first_row, first_row);
    const int64_t count = tokens / layout_.layers[layer].ratio, reads = rows * std::min(count, most_attended);
    const bool is_near = rows >= kFewestRows && reads >= kFewestReads * count && used + num_pages <= room;
    sequences.push_back(
        {slice.place, static_cast<int32_t>(num_pages), is_near ? static_cast<int32_t>(used) : int32_t{-1}});
    if (is_near) {
      used += num_pages;
    } else {
      has_far = true;
    }
  }
  if (used == 0) return far;
  comm::bring_near({.pages = far.pages,
                    .stride = far.stride,
                    .offset = far.offset,
                    .part_bytes = part_bytes,
                    .table = near_table_.as<uint8_t*>(),
                    .room = near_.as<uint8_t>()},
                   sequences, queue);
  ops::PagedEntries<uint8_t> near(near_table_.as<uint8_t*>(), far.stride, places, 0, far.shift);
  near.has_far = has_far, near.is_made_by_kernel = true;
  return near;
}

uint8_t* CachePool::state(StateId id, size_t layer, int32_t place) const {
  return states_[row(id, layer) * capacity_ + static_cast<size_t>(place)];
}

ops::SequenceEntries<uint8_t> CachePool::entries(EntriesId id, size_t layer, int32_t place) const {
  const Part& found = part(id, layer);
  return {nullptr, page_table(id) + static_cast<size_t>(place) * stride_, static_cast<int64_t>(found.offset),
          found.shift};
}

}  // namespace tessera::model
