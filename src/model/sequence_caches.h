// SPDX-License-Identifier: Apache-2.0
#pragma once
// The caches of one sequence, and its implementation of SequenceState. Entry counts follow from the position alone
// (position / ratio), so dropping tokens is a matter of restoring what later tokens overwrote: rings and compressors.
#include <memory>
#include <vector>

#include "device/buffer.h"
#include "model/runner.h"
#include "ops/cache_entry.h"
#include "ops/compressor/compressor.h"

namespace tessera::model {

// What one layer keeps; the same for every sequence of a model.
struct LayerCacheLayout {
  int64_t ratio = 0;         // 0: window only
  int64_t window_slots = 0;  // position p lies in slot p mod window_slots
  ops::EntryLayout kv;       // of window and compressed entries
  bool has_indexer = false;
  ops::EntryLayout index;
  ops::CompressorPool::Desc compressor, index_compressor;
};

struct CacheLayout {
  std::vector<LayerCacheLayout> layers;  // main layers, then the draft block's
  int num_draft_layers = 0;
  uint64_t fingerprint = 0;  // of model, weights and precision: what save() and restore() compare
};

CacheSpec make_cache_spec(const CacheLayout& layout);

// The bytes of one layer of one sequence.
struct LayerCaches {
  device::Buffer window, entries, index_keys, compressor, index_compressor;
};

class SequenceCaches final : public SequenceState {
 public:
  // `layout` must outlive the sequence (it belongs to the runner).
  SequenceCaches(const CacheLayout& layout, int64_t capacity);

  int64_t position() const override { return position_; }
  int64_t capacity() const override { return capacity_; }
  std::unique_ptr<SequenceState> fork() const override;
  std::unique_ptr<StateMark> mark() const override;
  void rollback(const StateMark& mark) override;
  std::vector<uint8_t> save() const override;
  // The inverse of save(); see Runner::restore.
  static std::unique_ptr<SequenceCaches> restore(const CacheLayout& layout, int64_t max_positions,
                                                 std::span<const uint8_t> bytes);

  const CacheLayout& layout() const { return *layout_; }
  LayerCaches& layer(size_t i) { return layers_[i]; }
  void advance(int64_t num_tokens) { position_ += num_tokens; }
  // Tokens that the draft block has seen.
  int64_t draft_position() const { return draft_position_; }
  void advance_draft(int64_t num_tokens) { draft_position_ += num_tokens; }

 private:
  const CacheLayout* layout_;
  int64_t capacity_ = 0, position_ = 0, draft_position_ = 0;
  std::vector<LayerCaches> layers_;
};

}  // namespace tessera::model
