// SPDX-License-Identifier: Apache-2.0
#pragma once
// The caches of one sequence, and its implementation of SequenceState. Entry counts follow from the position alone
// (position / ratio), so dropping tokens is a matter of restoring what later tokens overwrote: rings and compressors.
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
  std::vector<uint8_t> save() const override;
  // The inverse of save(); see Runner::restore.
  static std::unique_ptr<SequenceCaches> restore(CachePool& pool, int64_t max_positions,
                                                 std::span<const uint8_t> bytes);

  const CachePool& pool() const { return pool_; }
  int32_t place() const { return place_; }  // in the pool
  LayerCaches& layer(size_t i) { return layers_[i]; }
  void advance(int64_t num_tokens) { position_ += num_tokens; }
  // Tokens that the draft block has seen.
  int64_t draft_position() const { return draft_position_; }
  void advance_draft(int64_t num_tokens) { draft_position_ += num_tokens; }

 private:
  CachePool& pool_;
  int32_t place_ = 0;
  int64_t capacity_ = 0, position_ = 0, draft_position_ = 0;
  std::vector<LayerCaches> layers_;
};

}  // namespace tessera::model
