// SPDX-License-Identifier: Apache-2.0
#include "engine/tier_index.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace tessera::engine {

int64_t TierIndex::longest(const PrefixText& text, int64_t most) {
  // A state without its segments is of no use.
  size_t num_blocks = 0;
  while (num_blocks + 1 < text.digests.size() && segments_.contains(text.digests[num_blocks + 1])) ++num_blocks;
  for (size_t blocks = num_blocks + 1; blocks-- > 0;) {
    const int64_t begin = static_cast<int64_t>(blocks) * kDigestTokens;
    const std::span<const int32_t> rest = text.ids.subspan(static_cast<size_t>(begin));
    int64_t best = 0;
    const auto [first, last] = states_.equal_range(text.digests[blocks]);
    for (auto it = first; it != last; ++it) {
      const std::vector<int32_t>& tail = it->second->tail;
      const int64_t position = begin + static_cast<int64_t>(tail.size());
      if (position <= best || position > most || tail.size() > rest.size()) continue;
      if (std::equal(tail.begin(), tail.end(), rest.begin())) best = position;
    }
    if (best > 0) return best;
  }
  return 0;
}

TierIndex::Place TierIndex::state(const PrefixKey& key) {
  const auto [first, last] = states_.equal_range(key.digests.back());
  for (auto it = first; it != last; ++it) {
    const std::vector<int32_t>& tail = it->second->tail;
    if (std::equal(tail.begin(), tail.end(), key.tail.begin(), key.tail.end())) return it->second;
  }
  return items_.end();
}

TierIndex::Place TierIndex::segment(const PrefixDigest& digest) {
  const auto found = segments_.find(digest);
  return found == segments_.end() ? items_.end() : found->second;
}

TierIndex::Place TierIndex::item(int64_t id) {
  const auto found = ids_.find(id);
  return found == ids_.end() ? items_.end() : found->second;
}

TierIndex::Place TierIndex::add(TierItem item) {
  if (item.id == 0) item.id = last_id_ + 1;
  TESSERA_CHECK(!ids_.contains(item.id), "an id is one item's");
  items_.push_back(std::move(item));
  const Place place = std::prev(items_.end());
  try {
    ids_.emplace(place->id, place);
    if (place->is_segment) {
      TESSERA_CHECK(segments_.emplace(place->digest, place).second, "a block has one segment");
    } else {
      states_.emplace(place->digest, place);
    }
  } catch (...) {
    ids_.erase(place->id);
    items_.pop_back();
    throw;
  }
  last_id_ = std::max(last_id_, place->id);
  last_use_ = std::max(last_use_ + 1, place->last_use);
  place->last_use = last_use_;
  bytes_ += place->bytes;
  return place;
}

void TierIndex::remove(Place place) {
  bytes_ -= place->bytes;
  ids_.erase(place->id);
  if (place->is_segment) {
    segments_.erase(place->digest);
  } else {
    const auto [first, last] = states_.equal_range(place->digest);
    states_.erase(std::find_if(first, last, [&](const auto& one) { return one.second == place; }));
  }
  items_.erase(place);
}

void TierIndex::touch(Place place) {
  if (place == items_.end()) return;
  items_.splice(items_.end(), items_, place);
  place->last_use = ++last_use_;
}

void TierIndex::touch(const PrefixKey& key) {
  touch(state(key));
  for (size_t blocks = key.digests.size(); --blocks > 0;) touch(segment(key.digests[blocks]));
}

std::vector<TierIndex::Place> TierIndex::of_beginnings(const PrefixText& text) {
  std::vector<Place> found;
  for (size_t blocks = 0; blocks < text.digests.size(); ++blocks) {
    const std::span<const int32_t> rest = text.ids.subspan(blocks * static_cast<size_t>(kDigestTokens));
    const auto [first, last] = states_.equal_range(text.digests[blocks]);
    for (auto it = first; it != last; ++it) {
      const std::vector<int32_t>& tail = it->second->tail;
      if (tail.size() <= rest.size() && std::equal(tail.begin(), tail.end(), rest.begin())) found.push_back(it->second);
    }
    const Place its = blocks == 0 ? items_.end() : segment(text.digests[blocks]);
    if (its != items_.end()) found.push_back(its);
  }
  return found;
}

}  // namespace tessera::engine
