// SPDX-License-Identifier: Apache-2.0
#pragma once
// The caches of one sequence, and its implementation of SequenceState: a block with what has a fixed size, and pages
// with what grows, taken as tokens come. Entry counts follow from the position alone (position / ratio), so dropping
// tokens is a matter of restoring what later tokens overwrote: rings and compressors.
//
// Copies of a sequence share its pages. Whoever is about to write into a page that has another owner takes a copy of it
// first (make_room), so nobody sees another's entries.
#include <memory>
#include <vector>

#include "model/cache_pool.h"
#include "model/runner.h"

namespace tessera::model {

class SequenceCaches final : public SequenceState {
 public:
  // `pool` must outlive the sequence (it belongs to the runner).
  SequenceCaches(CachePool& pool, int64_t capacity);
  ~SequenceCaches() override;
  SequenceCaches(const SequenceCaches&) = delete;
  SequenceCaches& operator=(const SequenceCaches&) = delete;

  int64_t position() const override { return position_; }
  int64_t capacity() const override { return capacity_; }
  std::unique_ptr<SequenceState> fork() const override;
  std::unique_ptr<StateMark> mark() const override;
  void rollback(const StateMark& mark) override;
  std::unique_ptr<StateSnapshot> snapshot() const override;
  // See Runner::resume.
  static std::unique_ptr<SequenceCaches> resume(CachePool& pool, int64_t capacity, const StateSnapshot& snapshot);
  std::vector<uint8_t> save() const override;
  // The inverse of save(); see Runner::restore.
  static std::unique_ptr<SequenceCaches> restore(CachePool& pool, int64_t max_positions,
                                                 std::span<const uint8_t> bytes);

  const CachePool& pool() const { return pool_; }
  int32_t place() const { return place_; }  // in the pool
  // Addresses are of the pool's memory. Entries are there as far as make_room() was called for.
  std::span<uint8_t> state(StateId id, size_t layer) const { return pool_.state(block_, id, layer); }
  ops::SequenceEntries<uint8_t> entries(EntriesId id, size_t layer) const { return pool_.entries(id, layer, place_); }

  // What make_room() needs: pages that nobody has yet, their number, and copies of those that have other owners, which
  // are added to `shared`. Of several sequences that are about to write into one page, the last owner needs no copy.
  int64_t pages_missing(int64_t first_position, int64_t end_position, std::vector<int32_t>& shared) const;
  // Before entries of tokens [first_position, end_position) are written. Throws as PagePool::reserve; nothing has
  // changed then.
  void make_room(int64_t first_position, int64_t end_position);
  void advance(int64_t num_tokens) { position_ += num_tokens; }
  // Tokens that the draft block has seen.
  int64_t draft_position() const { return draft_position_; }
  void advance_draft(int64_t num_tokens) { draft_position_ += num_tokens; }

 private:
  // Calls visit(ring bytes, bytes) for what the next token attends of a layer's ring, in order of position.
  template <class Visit>
  void for_each_attended(size_t layer, const Visit& visit) const;
  // Calls visit(data, bytes) for each part of the caches that matters at the position, always in the same order.
  template <class Visit>
  void for_each_part(const Visit& visit) const;

  CachePool& pool_;
  int32_t place_ = 0;
  int64_t capacity_ = 0, position_ = 0, draft_position_ = 0;
  device::Buffer block_;
  std::vector<int32_t> pages_;  // of tokens [n * kPageTokens, (n + 1) * kPageTokens); with room for all
};

}  // namespace tessera::model
