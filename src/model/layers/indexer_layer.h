// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lightning indexer of a CSA layer: which compressed entries each token attends.
#include "model/layers/compressor_layer.h"

namespace tessera::model {

class IndexerLayer {
 public:
  IndexerLayer() = default;
  // `prefix`: "layers.2.attn.indexer.".
  IndexerLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, const device::Tensor& frequencies);

  // x [tokens, hidden], qr [tokens, q_lora_rank] -> ascending entry indices [tokens, top_k] (-1: none).
  const int32_t* run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& qr) const;
  int64_t top_k() const { return top_k_.desc.k; }
  const CompressorLayer& compressor() const { return compressor_; }

 private:
  std::string prefix_;
  const device::Tensor* frequencies_ = nullptr;
  LinearLayer wq_b_, weights_proj_;
  CompressorLayer compressor_;
  ops::Bound<ops::Rope> rope_;
  bool has_hadamard_ = false;
  ops::Bound<ops::Hadamard> hadamard_;
  ops::Bound<ops::IndexScores> scores_;
  ops::Bound<ops::TopK> top_k_;
};

}  // namespace tessera::model
