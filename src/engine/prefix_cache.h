// SPDX-License-Identifier: Apache-2.0
#pragma once
// Snapshots of sequences, kept in memory for requests whose prompts begin as they did (decision 0022). Found by the
// digest of a beginning's whole blocks and the ids after them; given up in order of their last use.
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/prefix_digest.h"
#include "engine/prefix_store.h"
#include "engine/prefix_tier.h"

namespace tessera::engine {

struct PrefixCacheOptions {
  // What snapshots may take: their own memory, and each page that any of them has, whether sequences that run have it
  // too or not. It comes on top of the budget of those.
  int64_t budget_bytes = 0;
  int64_t interval_tokens = 4096;  // of a prompt, after which a snapshot is taken wherever messages end
  int64_t least_gain_tokens = 16;  // a snapshot is not worth taking that is no further than so many past another
  // Tiers below; null: none. They must outlive the cache.
  PrefixTier* host = nullptr;      // gets what the budget gives up
  PrefixTier* disk = nullptr;      // gets what is taken
  int64_t least_load_tokens = 64;  // a snapshot is not worth loading that is no further than so many past another
};

class PrefixCache final : public PrefixStore {
 public:
  // The runner must outlive the cache, and its states are the engine's of that runner.
  PrefixCache(model::Runner& runner, const PrefixCacheOptions& options);
  ~PrefixCache() override;
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // Null also where memory does not suffice for the state, with or without the snapshots.
  std::unique_ptr<model::SequenceState> find(const Request& request, std::span<const int32_t> ids,
                                             int64_t capacity) override;
  int64_t next_offer(const Request& request, int64_t position) override;
  // Where memory does not suffice nothing is kept.
  void offer(const Request& request, std::span<const int32_t> ids, const model::SequenceState& state) override;
  void forget(const Request& request, std::span<const int32_t> ids) override;
  // Gives up the snapshot that was not used for the longest.
  bool give_up() override;
  PrefixStats stats() const override { return stats_; }

  // Throws kInternal where the ledger disagrees with the snapshots. Cost: all snapshots and their pages.
  void audit() const;

 private:
  struct Entry {
    std::vector<PrefixDigest> digests;  // of the salt and of its whole blocks
    std::vector<int32_t> tail;          // ids after them
    std::unique_ptr<model::StateSnapshot> snapshot;
  };
  using Place = std::list<Entry>::iterator;

  // The longest snapshot that has seen a beginning of `ids`, of at most `most` tokens; entries_.end(): none.
  Place longest(std::span<const PrefixDigest> digests, std::span<const int32_t> ids, int64_t most);
  void touch(Place entry);
  void add(const PrefixKey& key, std::unique_ptr<model::StateSnapshot> snapshot);
  void drop(Place entry);
  // Until `bytes` more fit, or nothing is left.
  void make_room(int64_t bytes);
  // Brings the longest snapshot of the tiers here, where it is worth it.
  void load(const PrefixText& text, int64_t most);
  bool load(PrefixTier& tier, const PrefixKey& key);
  void store(PrefixTier* tier, const PrefixKey& key, const model::StateSnapshot& snapshot);

  model::Runner& runner_;
  const PrefixCacheOptions options_;
  std::list<Entry> entries_;  // the last used ones last
  std::unordered_multimap<PrefixDigest, Place, PrefixDigestHash> index_;
  std::unordered_map<int32_t, int64_t> pages_;  // that snapshots have: how many of them
  PrefixStats stats_;
};

}  // namespace tessera::engine
