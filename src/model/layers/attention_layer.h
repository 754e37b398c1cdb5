// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of one layer: sliding window alone (SWA), with the indexer's choice of compressed entries (CSA), or with
// all heavily compressed entries (HCA). Source: DeepSeek-V4 inference/model.py, Attention; docs/contracts/numerics.md.
#include <memory>

#include "model/layers/indexer_layer.h"

namespace tessera::model {

class AttentionLayer {
 public:
  AttentionLayer() = default;
  // `prefix`: "layers.2.attn."; `with_entries` false: compressed entries are computed but not attended (a bypass).
  AttentionLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool with_entries);

  // x [tokens, hidden], normalised -> [tokens, hidden]. Writes the caches of every slice.
  TensorView run(const StepContext& context, size_t layer, const TensorView& x) const;
  LayerCacheLayout cache_layout() const;

 private:
  // Query vectors [tokens, heads, head_dim]; `qr` receives the shared low-rank rows.
  TensorView make_queries(const StepContext& context, const TensorView& x, TensorView& qr) const;
  void write_window(const StepContext& context, size_t layer, const TensorView& x) const;

  std::string prefix_;
  int64_t ratio_ = 0, window_slots_ = 0;
  bool with_entries_ = true;
  std::unique_ptr<device::Tensor> frequencies_;  // at a fixed address: parts keep a pointer
  LinearLayer wq_a_, wq_b_, wkv_, wo_a_, wo_b_;
  NormLayer q_norm_, q_head_norm_, kv_norm_;
  device::Tensor sink_;
  ops::Bound<ops::Rope> q_rope_, kv_rope_, out_rope_;
  ops::Bound<ops::CacheWrite> write_;
  ops::Bound<ops::Attention> attention_;
  CompressorLayer compressor_;
  IndexerLayer indexer_;
};

}  // namespace tessera::model
