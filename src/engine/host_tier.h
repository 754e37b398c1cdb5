// SPDX-License-Identifier: Apache-2.0
#pragma once
// Snapshots that a GPU's memory had no room for, in the host's. What was not used for the longest goes first.
#include <mutex>

#include "engine/tier_index.h"

namespace tessera::engine {

class HostTier final : public PrefixTier {
 public:
  explicit HostTier(int64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  int64_t longest(const PrefixText& text, int64_t most) override;
  std::optional<SnapshotBytes> load(const PrefixKey& key) override;
  bool has_state(const PrefixKey& key) override;
  bool has_segment(const PrefixDigest& digest) override;
  bool has_room(int64_t bytes) override;
  void put(const PrefixKey& key, SnapshotBytes bytes) override;
  void touch(const PrefixKey& key) override;
  void forget(const PrefixText& text) override;
  TierStats stats() const override;

 private:
  void evict_to(int64_t bytes);

  const int64_t budget_bytes_;
  mutable std::mutex lock_;  // for stats()
  TierIndex index_;
  TierStats stats_{.name = "host"};
};

}  // namespace tessera::engine
