// SPDX-License-Identifier: Apache-2.0
#pragma once
// A point of a sequence from which others go on (decision 0022), and its bytes (docs/formats/prefix-cache.md): what
// later tokens overwrite, copied, and the pages in which entries lie, shared.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/cache_pool.h"
#include "model/runner.h"

namespace tessera::model {

class SequenceSnapshot final : public StateSnapshot {
 public:
  // Room for the copies and for `max_pages` pages; the copies are whoever makes it to fill in. Throws as Buffer.
  SequenceSnapshot(CachePool& pool, int64_t position, int64_t draft_position, size_t max_pages);
  ~SequenceSnapshot() override;
  SequenceSnapshot(const SequenceSnapshot&) = delete;
  SequenceSnapshot& operator=(const SequenceSnapshot&) = delete;

  int64_t position() const override { return position_; }
  int64_t own_bytes() const override { return static_cast<int64_t>(block_.size()); }
  std::span<const int32_t> pages() const override { return pages_; }
  std::vector<uint8_t> save() const override;
  void save_page(size_t n, std::span<uint8_t> out) const override;
  // The inverse; see Runner::restore_snapshot.
  static std::unique_ptr<SequenceSnapshot> restore(CachePool& pool, int64_t max_positions,
                                                   std::span<const uint8_t> saved,
                                                   std::span<const std::span<const uint8_t>> pages);

  const CachePool& pool() const { return pool_; }
  int64_t draft_position() const { return draft_position_; }
  // The compressors' states, then of each layer what the next token attends of its ring, in order of position.
  uint8_t* block() const { return block_.as<uint8_t>(); }
  // One more page, which somebody else has too.
  void share(int32_t page);

 private:
  CachePool& pool_;
  int64_t position_, draft_position_;
  device::Buffer block_;
  std::vector<int32_t> pages_;
};

}  // namespace tessera::model
