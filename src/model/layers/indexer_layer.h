// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lightning indexer of a CSA layer: which compressed entries each token attends.
#include "model/layers/compressor_layer.h"

namespace tessera::model {

class IndexerLayer {
 public:
  IndexerLayer() = default;
  // `prefix`: "layers.2.attn.indexer.".
  IndexerLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio);

  // The maps of qr [tokens, q_lora_rank] to queries, and of x [tokens, hidden] to the weights of heads.
  const LinearLayer& wq_b() const { return wq_b_; }
  const LinearLayer& weights_proj() const { return weights_proj_; }
  const VectorSteps& steps() const { return steps_; }  // of queries
  const CompressorLayer& compressor() const { return compressor_; }
  // Queries of all tokens and weights, index keys behind their steps -> ascending entry indices [tokens, top_k] (-1:
  // none), from the arena. Where tokens are cut over ranks each rank chooses for its own, and what they chose is
  // gathered; with queries of its own tokens alone they are what is chosen for. Weights are of all tokens.
  const int32_t* select(const StepContext& context, size_t layer, const TensorView& queries,
                        const TensorView& weights) const;
  int64_t top_k() const { return top_k_.desc.k; }

 private:
  std::string prefix_;
  LinearLayer wq_b_, weights_proj_;
  CompressorLayer compressor_;
  VectorSteps steps_;
  ops::Bound<ops::IndexScores> scores_;
  ops::Bound<ops::TopK> top_k_;
};

}  // namespace tessera::model
