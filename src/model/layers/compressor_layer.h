// SPDX-License-Identifier: Apache-2.0
#pragma once
// A compressor: turns runs of tokens into cache entries (main entries of CSA and HCA layers, keys of the indexer).
#include "model/layers/vector_steps.h"

namespace tessera::model {

class CompressorLayer {
 public:
  enum class Kind { kMain, kIndex };

  CompressorLayer() = default;
  // `prefix`: "layers.2.attn.compressor." or "layers.2.attn.indexer.compressor.".
  CompressorLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, Kind kind);

  // The maps of x [tokens, hidden] whose rows are pooled, FP32.
  const LinearLayer& wkv() const { return wkv_; }
  const LinearLayer& wgate() const { return wgate_; }
  // What pools those rows into the entries that the slices' tokens complete, and updates each slice's state; one call
  // of it, whose entries are taken from the arena.
  const ops::Bound<ops::CompressorPool>& pool() const { return pool_; }
  ops::CompressorPool::Args take_pool_call(const StepContext& context, size_t layer, const TensorView& values,
                                           const TensorView& gates) const;
  // What steps() are to do to pooled entries: without rows where no entry is complete.
  VectorSteps::Rows entry_rows(const StepContext& context, size_t layer, const TensorView& entries) const;
  const VectorSteps& steps() const { return steps_; }
  // The entries, behind their steps.
  void trace_entries(const StepContext& context, size_t layer, const TensorView& entries) const;

  const ops::CompressorPool::Desc& pool_desc() const { return pool_.desc; }
  const ops::EntryLayout& entry_layout() const { return steps_.write->desc.layout; }

 private:
  EntriesId cache() const { return kind_ == Kind::kMain ? EntriesId::kEntries : EntriesId::kIndexKeys; }

  std::string prefix_;
  Kind kind_ = Kind::kMain;
  LinearLayer wkv_, wgate_;
  device::Tensor ape_;
  ops::Bound<ops::CompressorPool> pool_;
  VectorSteps steps_;
};

}  // namespace tessera::model
