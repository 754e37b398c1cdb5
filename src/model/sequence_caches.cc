// SPDX-License-Identifier: Apache-2.0
#include "model/sequence_caches.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "model/sequence_snapshot.h"

namespace tessera::model {

namespace {

// A saved sequence: this header, then every buffer's bytes that hold something, layer by layer.
struct SavedHeader {
  char magic[8] = {'T', 'S', 'S', 'T', 'A', 'T', 'E', '1'};
  uint64_t fingerprint = 0;
  int64_t capacity = 0, position = 0, draft_position = 0;
  uint64_t payload_bytes = 0;
  uint64_t hash = 0;  // XXH3-64 of payload and header, with this field 0
};
static_assert(sizeof(SavedHeader) == 56, "written as raw bytes");

constexpr const char* kSavedName = "saved sequence";

class Mark final : public StateMark {
 public:
  Mark(const SequenceCaches* maker, int64_t position, int64_t draft_position, device::Buffer saved_block)
      : owner(maker), at(position), draft_at(draft_position), block(std::move(saved_block)) {}
  int64_t position() const override { return at; }

  const SequenceCaches* owner;
  int64_t at, draft_at;
  device::Buffer block;
};

// Bytes of a layer's growing caches that hold entries of tokens before `position`.
size_t entry_bytes_at(const LayerCacheLayout& layout, int64_t position) {
  return layout.ratio == 0 ? 0 : static_cast<size_t>(position / layout.ratio * layout.kv.entry_bytes());
}

size_t index_bytes_at(const LayerCacheLayout& layout, int64_t position) {
  return layout.has_indexer ? static_cast<size_t>(position / layout.ratio * layout.index.entry_bytes()) : 0;
}

uint64_t hash_of(SavedHeader header, std::span<const uint8_t> payload) {
  header.hash = 0;
  return XXH3_64bits_withSeed(payload.data(), payload.size(), XXH3_64bits(&header, sizeof(header)));
}

// Bytes that all parts take at `position`.
size_t payload_bytes_at(const CacheLayout& layout, int64_t position) {
  size_t total = 0;
  for (const LayerCacheLayout& layer : layout.layers) {
    total += static_cast<size_t>(layer.window_slots * layer.kv.entry_bytes());
    total += entry_bytes_at(layer, position) + index_bytes_at(layer, position);
    if (layer.ratio != 0) total += static_cast<size_t>(layer.compressor.state_floats()) * sizeof(float);
    if (layer.has_indexer) total += static_cast<size_t>(layer.index_compressor.state_floats()) * sizeof(float);
  }
  return total;
}

}  // namespace

SequenceCaches::SequenceCaches(CachePool& pool, int64_t capacity)
    : pool_(pool), capacity_(capacity), block_(pool.make_block()) {
  const int64_t max_pages = pool.pages_for(capacity);
  pages_.reserve(static_cast<size_t>(max_pages));  // make_room() does not allocate
  place_ = pool.add(block_, max_pages);
}

SequenceCaches::~SequenceCaches() {
  for (const int32_t page : pages_) pool_.pages().release(page);
  pool_.remove(place_);
}

int64_t SequenceCaches::pages_missing(int64_t first_position, int64_t end_position,
                                      std::vector<int32_t>& shared) const {
  if (end_position == first_position) return 0;
  const size_t end = static_cast<size_t>(pool_.pages_for(end_position));
  for (size_t n = static_cast<size_t>(first_position / kPageTokens); n < std::min(end, pages_.size()); ++n) {
    if (pool_.pages().is_shared(pages_[n])) shared.push_back(pages_[n]);
  }
  return static_cast<int64_t>(end) - static_cast<int64_t>(std::min(end, pages_.size()));
}

void SequenceCaches::make_room(int64_t first_position, int64_t end_position) {
  std::vector<int32_t> shared;
  const int64_t num_new = pages_missing(first_position, end_position, shared);
  const int64_t missing = num_new + static_cast<int64_t>(shared.size());
  if (missing == 0) return;
  TESSERA_CHECK(end_position <= capacity_, fmt::format("{} of {} tokens", end_position, capacity_));
  PagePool& pool = pool_.pages();
  pool.reserve(missing);
  const size_t first = static_cast<size_t>(first_position / kPageTokens);
  const size_t end = static_cast<size_t>(pool_.pages_for(end_position));
  for (size_t n = first; n < std::min(end, pages_.size()); ++n) {
    if (!pool.is_shared(pages_[n])) continue;
    const int32_t theirs = std::exchange(pages_[n], pool.take());  // now whoever ends gives the new one back
    pool.release(theirs);                                          // by one owner of several: it stays
    pool.copy(pages_[n], theirs);
  }
  const size_t changed = std::min(first, pages_.size());
  while (pages_.size() < end) pages_.push_back(pool.take());
  pool_.set_pages(place_, static_cast<int64_t>(changed), std::span(pages_).subspan(changed));
}

std::unique_ptr<SequenceState> SequenceCaches::fork() const {
  auto copy = std::make_unique<SequenceCaches>(pool_, capacity_);
  copy->position_ = position_;
  copy->draft_position_ = draft_position_;
  pool_.memory().copy(copy->block_.data(), block_.data(), block_.size());
  copy->pages_ = pages_;
  for (const int32_t page : pages_) pool_.pages().share(page);
  pool_.set_pages(copy->place_, 0, copy->pages_);
  return copy;
}

std::unique_ptr<StateMark> SequenceCaches::mark() const {
  return std::make_unique<Mark>(this, position_, draft_position_, block_.clone());
}

void SequenceCaches::rollback(const StateMark& state_mark) {
  const Mark* mark = dynamic_cast<const Mark*>(&state_mark);
  TESSERA_CHECK(mark != nullptr && mark->owner == this, "a mark belongs to the sequence that made it");
  TESSERA_CHECK(mark->at <= position_, fmt::format("mark at {}, sequence at {}", mark->at, position_));
  pool_.memory().copy(block_.data(), mark->block.data(), block_.size());
  position_ = mark->at;
  draft_position_ = mark->draft_at;
  for (const size_t kept = static_cast<size_t>(pool_.pages_for(position_)); pages_.size() > kept; pages_.pop_back()) {
    pool_.pages().release(pages_.back());
  }
}

template <class Visit>
void SequenceCaches::for_each_attended(size_t layer, const Visit& visit) const {
  const LayerCacheLayout& layout = pool_.layout().layers[layer];
  const int64_t entry_bytes = layout.kv.entry_bytes(), slots = layout.window_slots;
  uint8_t* const ring = state(StateId::kWindow, layer).data();
  auto [position, end] = pool_.attended(layer, position_, draft_position_);
  while (position < end) {  // once more where the ring begins anew
    const int64_t slot = position % slots, count = std::min(end - position, slots - slot);
    visit(ring + slot * entry_bytes, static_cast<size_t>(count * entry_bytes));
    position += count;
  }
}

std::unique_ptr<StateSnapshot> SequenceCaches::snapshot() const {
  const std::span<const int32_t> pages = std::span(pages_).first(static_cast<size_t>(pool_.pages_for(position_)));
  auto snapshot = std::make_unique<SequenceSnapshot>(pool_, position_, draft_position_, pages.size());
  for (const int32_t page : pages) snapshot->share(page);
  uint8_t* next = snapshot->block();
  const auto keep = [&](const uint8_t* data, size_t part_bytes) {
    pool_.memory().copy(next, data, part_bytes);
    next += part_bytes;
  };
  const std::span<const uint8_t> compressors = pool_.compressor_states(block_);
  if (!compressors.empty()) keep(compressors.data(), compressors.size());
  for (size_t i = 0; i < pool_.layout().layers.size(); ++i) for_each_attended(i, keep);
  return snapshot;
}

std::unique_ptr<SequenceCaches> SequenceCaches::resume(CachePool& pool, int64_t capacity,
                                                       const StateSnapshot& state_snapshot) {
  const SequenceSnapshot* snapshot = dynamic_cast<const SequenceSnapshot*>(&state_snapshot);
  TESSERA_CHECK(snapshot != nullptr && &snapshot->pool() == &pool, "a snapshot belongs to the runner that made it");
  if (capacity < snapshot->position()) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("a sequence of {} tokens goes on from {} of them", capacity, snapshot->position()));
  }
  auto state = std::make_unique<SequenceCaches>(pool, capacity);
  state->position_ = snapshot->position();
  state->draft_position_ = snapshot->draft_position();
  state->pages_.assign(snapshot->pages().begin(), snapshot->pages().end());
  for (const int32_t page : state->pages_) pool.pages().share(page);
  pool.set_pages(state->place_, 0, state->pages_);
  const uint8_t* next = snapshot->block();
  const auto put_back = [&](uint8_t* data, size_t part_bytes) {
    pool.memory().copy(data, next, part_bytes);
    next += part_bytes;
  };
  const std::span<uint8_t> compressors = pool.compressor_states(state->block_);
  if (!compressors.empty()) put_back(compressors.data(), compressors.size());
  for (size_t i = 0; i < pool.layout().layers.size(); ++i) state->for_each_attended(i, put_back);
  return state;
}

template <class Visit>
void SequenceCaches::for_each_part(const Visit& visit) const {
  const auto visit_state = [&](StateId id, size_t layer) {
    const std::span<uint8_t> part = state(id, layer);
    visit(part.data(), part.size());
  };
  for (size_t i = 0; i < pool_.layout().layers.size(); ++i) {
    const LayerCacheLayout& layer = pool_.layout().layers[i];
    const auto visit_entries = [&](EntriesId id, int64_t entry_bytes) {
      ops::for_each_run(
          entries(id, i), 0, position_ / layer.ratio, entry_bytes,
          [&](uint8_t* data, int64_t, int64_t count) { visit(data, static_cast<size_t>(count * entry_bytes)); });
    };
    visit_state(StateId::kWindow, i);
    if (layer.ratio != 0) visit_entries(EntriesId::kEntries, layer.kv.entry_bytes());
    if (layer.has_indexer) visit_entries(EntriesId::kIndexKeys, layer.index.entry_bytes());
    visit_state(StateId::kCompressor, i);
    visit_state(StateId::kIndexCompressor, i);
  }
}

std::vector<uint8_t> SequenceCaches::save() const {
  SavedHeader header;
  header.fingerprint = pool_.layout().fingerprint;
  header.capacity = capacity_, header.position = position_, header.draft_position = draft_position_;
  std::vector<uint8_t> out(sizeof(header));
  for_each_part([&](const void* data, size_t bytes) {
    out.resize(out.size() + bytes);
    pool_.memory().download(out.data() + out.size() - bytes, data, bytes);
  });
  header.payload_bytes = out.size() - sizeof(header);
  header.hash = hash_of(header, std::span(out).subspan(sizeof(header)));
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

std::unique_ptr<SequenceCaches> SequenceCaches::restore(CachePool& pool, int64_t max_positions,
                                                        std::span<const uint8_t> bytes) {
  const CacheLayout& layout = pool.layout();
  SavedHeader header;
  const SavedHeader expected;
  if (bytes.size() < sizeof(header)) {
    fail_data(kSavedName, "size", fmt::format("at least {} bytes", sizeof(header)), fmt::format("{}", bytes.size()));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, expected.magic, sizeof(header.magic)) != 0) {
    fail_data(kSavedName, "magic", "TSSTATE1", "something else");
  }
  if (header.fingerprint != layout.fingerprint) {
    fail_data(kSavedName, "fingerprint", fmt::format("{:016x}, this model in this precision", layout.fingerprint),
              fmt::format("{:016x}", header.fingerprint));
  }
  const std::span<const uint8_t> payload = bytes.subspan(sizeof(header));
  if (header.payload_bytes != payload.size()) {
    fail_data(kSavedName, "payload", fmt::format("{} bytes", header.payload_bytes), fmt::format("{}", payload.size()));
  }
  if (header.hash != hash_of(header, payload)) {
    fail_data(kSavedName, "hash", fmt::format("{:016x}", header.hash), "another one: the bytes are damaged");
  }
  // A hash is no signature: bound everything before memory is taken for it.
  if (header.capacity < 0 || header.capacity > max_positions || header.position < 0 ||
      header.position > header.capacity || header.draft_position < 0 || header.draft_position > header.position) {
    fail_data(kSavedName, "positions", fmt::format("0 <= draft <= position <= capacity <= {}", max_positions),
              fmt::format("{}, {}, {}", header.draft_position, header.position, header.capacity));
  }
  if (const size_t expected_bytes = payload_bytes_at(layout, header.position); expected_bytes != payload.size()) {
    fail_data(kSavedName, "payload", fmt::format("{} bytes", expected_bytes), fmt::format("{}", payload.size()));
  }
  auto state = std::make_unique<SequenceCaches>(pool, header.capacity);
  state->make_room(0, header.position);
  state->position_ = header.position;
  state->draft_position_ = header.draft_position;
  size_t used = 0;
  state->for_each_part([&](void* data, size_t part_bytes) {
    pool.memory().upload(data, payload.data() + used, part_bytes);
    used += part_bytes;
  });
  return state;
}

}  // namespace tessera::model
