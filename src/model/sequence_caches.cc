// SPDX-License-Identifier: Apache-2.0
#include "model/sequence_caches.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "base/error.h"

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
  Mark(const SequenceCaches* maker, int64_t position, int64_t draft_position)
      : owner(maker), at(position), draft_at(draft_position) {}
  int64_t position() const override { return at; }

  const SequenceCaches* owner;
  int64_t at, draft_at;
  std::vector<LayerCaches> layers;  // window and compressor states only
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

// Calls visit(data, bytes) for each part of a layer that matters at `position`, always in the same order.
template <class Visit>
void for_each_part(const LayerCacheLayout& layout, LayerCaches& caches, int64_t position, const Visit& visit) {
  visit(caches.window.data(), caches.window.size());
  visit(caches.entries.data(), entry_bytes_at(layout, position));
  visit(caches.index_keys.data(), index_bytes_at(layout, position));
  visit(caches.compressor.data(), caches.compressor.size());
  visit(caches.index_compressor.data(), caches.index_compressor.size());
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

void copy_bytes(const device::Buffer& from, const device::Buffer& to) {
  to.memory().copy(to.data(), from.data(), from.size());
}

}  // namespace

SequenceCaches::SequenceCaches(CachePool& pool, int64_t capacity) : pool_(pool), capacity_(capacity) {
  device::MemorySpace& memory = pool.memory();
  const auto compressor = [&](const ops::CompressorPool::Desc& desc) {
    device::Buffer state(static_cast<size_t>(desc.state_floats()) * sizeof(float));
    ops::compressor_reset(desc, state.as<float>());
    return memory.is_host() ? std::move(state) : state.clone_into(memory);
  };
  for (const LayerCacheLayout& layer : pool.layout().layers) {
    LayerCaches caches;
    caches.window = device::Buffer(static_cast<size_t>(layer.window_slots * layer.kv.entry_bytes()), memory);
    if (layer.ratio != 0) {
      caches.entries = device::Buffer(entry_bytes_at(layer, capacity), memory);
      caches.compressor = compressor(layer.compressor);
    }
    if (layer.has_indexer) {
      caches.index_keys = device::Buffer(index_bytes_at(layer, capacity), memory);
      caches.index_compressor = compressor(layer.index_compressor);
    }
    layers_.push_back(std::move(caches));
  }
  place_ = pool.add(layers_);
}

SequenceCaches::~SequenceCaches() {
  pool_.remove(place_);
}

std::unique_ptr<SequenceState> SequenceCaches::fork() const {
  auto copy = std::make_unique<SequenceCaches>(pool_, capacity_);
  copy->position_ = position_;
  copy->draft_position_ = draft_position_;
  for (size_t i = 0; i < layers_.size(); ++i) {
    copy_bytes(layers_[i].window, copy->layers_[i].window);
    copy_bytes(layers_[i].entries, copy->layers_[i].entries);
    copy_bytes(layers_[i].index_keys, copy->layers_[i].index_keys);
    copy_bytes(layers_[i].compressor, copy->layers_[i].compressor);
    copy_bytes(layers_[i].index_compressor, copy->layers_[i].index_compressor);
  }
  return copy;
}

std::unique_ptr<StateMark> SequenceCaches::mark() const {
  auto mark = std::make_unique<Mark>(this, position_, draft_position_);
  for (const LayerCaches& layer : layers_) {
    LayerCaches saved;
    saved.window = layer.window.clone();
    saved.compressor = layer.compressor.clone();
    saved.index_compressor = layer.index_compressor.clone();
    mark->layers.push_back(std::move(saved));
  }
  return mark;
}

void SequenceCaches::rollback(const StateMark& state_mark) {
  const Mark* mark = dynamic_cast<const Mark*>(&state_mark);
  TESSERA_CHECK(mark != nullptr && mark->owner == this, "a mark belongs to the sequence that made it");
  TESSERA_CHECK(mark->at <= position_, fmt::format("mark at {}, sequence at {}", mark->at, position_));
  for (size_t i = 0; i < layers_.size(); ++i) {
    copy_bytes(mark->layers[i].window, layers_[i].window);
    copy_bytes(mark->layers[i].compressor, layers_[i].compressor);
    copy_bytes(mark->layers[i].index_compressor, layers_[i].index_compressor);
  }
  position_ = mark->at;
  draft_position_ = mark->draft_at;
}

std::vector<uint8_t> SequenceCaches::save() const {
  SavedHeader header;
  header.fingerprint = pool_.layout().fingerprint;
  header.capacity = capacity_, header.position = position_, header.draft_position = draft_position_;
  std::vector<uint8_t> out(sizeof(header));
  for (size_t i = 0; i < layers_.size(); ++i) {
    // The visitor only reads here.
    for_each_part(pool_.layout().layers[i], const_cast<LayerCaches&>(layers_[i]), position_,
                  [&](void* data, size_t bytes) {
                    out.resize(out.size() + bytes);
                    pool_.memory().download(out.data() + out.size() - bytes, data, bytes);
                  });
  }
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
  state->position_ = header.position;
  state->draft_position_ = header.draft_position;
  size_t used = 0;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    for_each_part(layout.layers[i], state->layers_[i], header.position, [&](void* data, size_t part_bytes) {
      pool.memory().upload(data, payload.data() + used, part_bytes);
      used += part_bytes;
    });
  }
  return state;
}

}  // namespace tessera::model
