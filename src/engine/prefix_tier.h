// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tier below the prefix cache (decision 0028): snapshots as bytes, in the host's memory or on a disk. A snapshot is a
// state (what it shares with nobody, and the pages after its last whole block) and a segment for each whole block of
// kDigestTokens tokens: the pages of that block, the same bytes whoever ran it, kept once.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/prefix_digest.h"

namespace tessera::engine {

using SharedBytes = std::shared_ptr<const std::vector<uint8_t>>;

// A text that is looked up.
struct PrefixText {
  std::span<const PrefixDigest> digests;  // prefix_digests(salt, ids)
  std::span<const int32_t> ids;
};

// What a snapshot has seen.
struct PrefixKey {
  std::span<const PrefixDigest> digests;  // of the salt, and of each whole block
  std::span<const int32_t> tail;          // ids after those

  size_t num_blocks() const { return digests.size() - 1; }
  int64_t position() const {
    return static_cast<int64_t>(num_blocks()) * kDigestTokens + static_cast<int64_t>(tail.size());
  }
};

// Of one that has seen the text's first `position` tokens.
inline PrefixKey prefix_key(const PrefixText& text, int64_t position) {
  const size_t num_blocks = static_cast<size_t>(position / kDigestTokens);
  const size_t tail_begin = num_blocks * static_cast<size_t>(kDigestTokens);
  return {text.digests.first(num_blocks + 1), text.ids.subspan(tail_begin, static_cast<size_t>(position) - tail_begin)};
}

struct SnapshotBytes {
  SharedBytes state;                  // StateSnapshot::save()
  SharedBytes tail_pages;             // after the last whole block; may be empty
  std::vector<SharedBytes> segments;  // of the whole blocks in order. Null: the tier has it
};

struct TierStats {
  const char* name = "";                        // "host", "disk"
  int64_t num_snapshots = 0, num_segments = 0;  // now
  int64_t bytes = 0, total_bytes = 0;           // that they take, and may take
  // Since the beginning; never falling.
  int64_t num_hits = 0, num_hit_tokens = 0;  // snapshots given back, and what they had seen
  int64_t num_stored = 0;                    // snapshots
  int64_t num_evicted = 0;                   // states and segments that went for others
  int64_t num_dropped = 0;                   // snapshots that were not taken: larger than the tier, or it was busy
  int64_t num_faults = 0;                    // failures to write, read or verify
};

// All but stats() are called by the engine's thread alone.
class PrefixTier {
 public:
  virtual ~PrefixTier() = default;
  // How far the longest snapshot has come that has seen a beginning of the text, at most `most` tokens. 0: there is
  // none.
  virtual int64_t longest(const PrefixText& text, int64_t most) = 0;
  // Its bytes, whole and verified. Nothing: it has gone, or was damaged and is gone now.
  virtual std::optional<SnapshotBytes> load(const PrefixKey& key) = 0;
  // What put() needs no bytes of.
  virtual bool has_state(const PrefixKey& key) = 0;
  virtual bool has_segment(const PrefixDigest& digest) = 0;
  // Whether put() takes so many bytes now. Refusals of a tier that is on are counted.
  virtual bool has_room(int64_t bytes) = 0;
  virtual void put(const PrefixKey& key, SnapshotBytes bytes) = 0;
  // The snapshot was used where it lies above: what of it is here counts as used too.
  virtual void touch(const PrefixKey& key) = 0;
  // Snapshots that have seen a beginning of the text, and its segments, are not to be trusted.
  virtual void forget(const PrefixText& text) = 0;
  // Any thread may ask.
  virtual TierStats stats() const = 0;
};

}  // namespace tessera::engine
