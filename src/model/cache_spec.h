// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a sequence keeps between steps, and how much memory that takes: kinds of cache, bytes per entry, growth.
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::model {

// One cache of one layer.
struct CacheKind {
  std::string name;  // "layers.2.window", "layers.2.entries", "layers.2.index_keys", "layers.2.compressor"
  int64_t entry_bytes = 0;
  int64_t fixed_entries = 0;  // ring slots, or 1 for a compressor's state
  int64_t ratio = 0;          // > 0: one more entry every `ratio` tokens
  int64_t ranks = 1;          // that have one copy of it among them; of which a rank holds its part
};

// Caches that grow take memory in pages: of this many tokens of one sequence, for all layers (decision 0021).
constexpr int64_t kPageTokens = 256;

// What a runner's caches are to have room for, in bytes that CacheSpec counts, of one rank. `most_running` bounds what
// sequences have that does not grow.
struct CacheRoom {
  int64_t running = 0;                        // of sequences
  int64_t prefixes = 0;                       // of snapshots
  int64_t most_running = 0, most_tokens = 0;  // sequences at once, and tokens of each
};

struct CacheSpec {
  std::vector<CacheKind> kinds;
  int64_t page_tokens = 1;  // growing caches take memory for a multiple of so many tokens
  int64_t page_bytes = 0;   // of page_tokens tokens, a rank's part of what ranks share; 0: nothing grows
  // Most that a snapshot of a sequence takes besides the pages that it shares.
  int64_t snapshot_bytes = 0;

  // Bytes of a sequence that has grown to `max_tokens`, on one rank.
  int64_t bytes(int64_t max_tokens) const {
    const int64_t paid_tokens = (max_tokens + page_tokens - 1) / page_tokens * page_tokens;
    int64_t total = 0;
    for (const CacheKind& kind : kinds) {
      const int64_t entries = kind.fixed_entries + (kind.ratio > 0 ? paid_tokens / kind.ratio : 0);
      total += (kind.entry_bytes * entries + kind.ranks - 1) / kind.ranks;
    }
    return total;
  }
};

}  // namespace tessera::model
