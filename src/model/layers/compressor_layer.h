// SPDX-License-Identifier: Apache-2.0
#pragma once
// A compressor: turns runs of tokens into cache entries (main entries of CSA and HCA layers, keys of the indexer).
#include "model/layers/linear_layer.h"

namespace tessera::model {

class CompressorLayer {
 public:
  enum class Kind { kMain, kIndex };

  CompressorLayer() = default;
  // `prefix`: "layers.2.attn.compressor." or "layers.2.attn.indexer.compressor.".
  CompressorLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, Kind kind,
                  const device::Tensor& frequencies);

  // Consumes x [tokens, hidden]; updates each slice's state and appends the entries that its tokens complete.
  void run(const StepContext& context, size_t layer, const TensorView& x) const;
  const ops::CompressorPool::Desc& pool_desc() const { return pool_.desc; }
  const ops::EntryLayout& entry_layout() const { return write_.desc.layout; }

 private:
  void trace_entries(const StepContext& context, size_t layer, EntriesId cache, const TensorView& entries) const;

  std::string prefix_;
  Kind kind_ = Kind::kMain;
  const device::Tensor* frequencies_ = nullptr;
  LinearLayer wkv_, wgate_;
  device::Tensor ape_;
  NormLayer norm_;
  ops::Bound<ops::CompressorPool> pool_;
  ops::Bound<ops::Rope> rope_;
  bool has_hadamard_ = false;
  ops::Bound<ops::Hadamard> hadamard_;
  ops::Bound<ops::CacheWrite> write_;
};

}  // namespace tessera::model
