// SPDX-License-Identifier: Apache-2.0
#pragma once
// The draft block (MTP): from the streams at a token and the token that follows, logits for the one after.
// Source: DeepSeek-V4 inference/model.py, MTPBlock; report arXiv 2606.19348.
#include "model/layers/block.h"

namespace tessera::model {

class DraftBlock {
 public:
  // `prefix`: "mtp.0.".
  DraftBlock(LayerBuilder& builder, const std::string& prefix);

  // streams [tokens, 4, hidden] of the main stack (unchanged), next [tokens, hidden]: the embeddings of the tokens that
  // follow. Returns the block's own streams, from the arena.
  TensorView run(const StepContext& context, size_t layer, const TensorView& streams, const TensorView& next) const;
  const OutputHead& head() const { return head_; }
  LayerCacheLayout cache_layout() const { return block_.cache_layout(); }

 private:
  std::string prefix_;
  NormLayer embedding_norm_, stream_norm_;
  LinearLayer e_proj_, h_proj_;
  ops::Bound<ops::StreamAdd> add_;
  Block block_;
  OutputHead head_;
};

}  // namespace tessera::model
