// SPDX-License-Identifier: Apache-2.0
#include "engine/host_tier.h"

#include <utility>

namespace tessera::engine {

int64_t HostTier::longest(const PrefixText& text, int64_t most) {
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.longest(text, most);
}

std::optional<SnapshotBytes> HostTier::load(const PrefixKey& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  const TierIndex::Place state = index_.state(key);
  if (state == index_.end()) return std::nullopt;
  SnapshotBytes out{state->first, state->second, {}};
  for (const PrefixDigest& digest : key.digests.subspan(1)) {
    const TierIndex::Place segment = index_.segment(digest);
    if (segment == index_.end()) return std::nullopt;
    out.segments.push_back(segment->first);
  }
  index_.touch(key);
  ++stats_.num_hits;
  stats_.num_hit_tokens += key.position();
  return out;
}

bool HostTier::has_state(const PrefixKey& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.state(key) != index_.end();
}

bool HostTier::has_segment(const PrefixDigest& digest) {
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.segment(digest) != index_.end();
}

bool HostTier::has_room(int64_t bytes) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (bytes <= budget_bytes_) return true;
  ++stats_.num_dropped;
  return false;
}

void HostTier::put(const PrefixKey& key, SnapshotBytes bytes) {
  const std::lock_guard<std::mutex> hold(lock_);
  for (size_t i = 0; i < bytes.segments.size(); ++i) {
    const PrefixDigest& digest = key.digests[i + 1];
    if (bytes.segments[i] == nullptr || index_.segment(digest) != index_.end()) continue;
    const auto size = static_cast<int64_t>(bytes.segments[i]->size());
    index_.add(
        {.is_segment = true, .digest = digest, .tail = {}, .bytes = size, .first = bytes.segments[i], .second = {}});
  }
  if (index_.state(key) == index_.end()) {
    const auto size = static_cast<int64_t>(bytes.state->size() + bytes.tail_pages->size());
    index_.add({.digest = key.digests.back(),
                .tail = {key.tail.begin(), key.tail.end()},
                .bytes = size,
                .first = std::move(bytes.state),
                .second = std::move(bytes.tail_pages)});
    ++stats_.num_stored;
  }
  index_.touch(key);
  evict_to(budget_bytes_);
}

void HostTier::evict_to(int64_t bytes) {
  for (; index_.bytes() > bytes; ++stats_.num_evicted) index_.remove(index_.oldest());
}

void HostTier::touch(const PrefixKey& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  index_.touch(key);
}

void HostTier::forget(const PrefixText& text) {
  const std::lock_guard<std::mutex> hold(lock_);
  for (const TierIndex::Place place : index_.of_beginnings(text)) index_.remove(place);
}

TierStats HostTier::stats() const {
  const std::lock_guard<std::mutex> hold(lock_);
  TierStats out = stats_;
  out.num_snapshots = index_.num_states(), out.num_segments = index_.num_segments();
  out.bytes = index_.bytes(), out.total_bytes = budget_bytes_;
  return out;
}

}  // namespace tessera::engine
