// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a tier has and what goes first: states by the digest of their whole blocks and the ids after them, segments by
// the digest of their block, all in one order of last use. Not thread-safe.
#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "engine/prefix_tier.h"

namespace tessera::engine {

struct TierItem {
  int64_t id = 0;
  bool is_segment = false;    // else a state
  PrefixDigest digest{};      // of the whole blocks that it has seen
  std::vector<int32_t> tail;  // of a state: ids after those
  int64_t bytes = 0;
  // A state's bytes and its tail's pages, or a segment's and null; null where they are elsewhere.
  SharedBytes first, second;
  int64_t last_use = 0;
};

class TierIndex {
 public:
  using Place = std::list<TierItem>::iterator;

  // The longest snapshot of a beginning of the text, at most `most` tokens, whose segments are all here: its position.
  // 0: none.
  int64_t longest(const PrefixText& text, int64_t most);
  // end(): it is not here.
  Place state(const PrefixKey& key);
  Place segment(const PrefixDigest& digest);
  Place item(int64_t id);
  Place end() { return items_.end(); }
  bool empty() const { return items_.empty(); }
  Place oldest() { return items_.begin(); }
  // Everything, the least recently used first.
  const std::list<TierItem>& items() const { return items_; }

  // The most recently used one: its last_use stays where it is later than all others', as those of an earlier life are
  // in their order. An id of 0 is replaced by a new one; throws kInternal for an id that is here.
  Place add(TierItem item);
  void remove(Place place);
  // Used now: of its snapshots the state goes first, then segments from the last on.
  void touch(const PrefixKey& key);
  // Places that have seen a beginning of the text: states, and segments.
  std::vector<Place> of_beginnings(const PrefixText& text);

  int64_t bytes() const { return bytes_; }
  int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
  int64_t num_segments() const { return static_cast<int64_t>(segments_.size()); }

 private:
  void touch(Place place);

  std::list<TierItem> items_;
  std::unordered_multimap<PrefixDigest, Place, PrefixDigestHash> states_;
  std::unordered_map<PrefixDigest, Place, PrefixDigestHash> segments_;
  std::unordered_map<int64_t, Place> ids_;
  int64_t bytes_ = 0, last_id_ = 0, last_use_ = 0;
};

}  // namespace tessera::engine
