// SPDX-License-Identifier: Apache-2.0
#pragma once
// One layer: attention and mixture of experts, each inside its hyper-connection; and the head that ends a stack.
#include "model/layers/attention_layer.h"
#include "model/layers/hyper_connection.h"
#include "model/layers/moe_layer.h"

namespace tessera::model {

class Block {
 public:
  // `prefix`: "layers.2." or "mtp.0.".
  Block(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool is_hashed, const Bypass& bypass);

  // streams [tokens, 4, hidden] in place; `layer` is the index of this block's caches.
  void run(const StepContext& context, size_t layer, const TensorView& streams) const;
  LayerCacheLayout cache_layout() const { return attention_.cache_layout(); }

 private:
  // Between the sublayers: writes attention's output and reads the experts' input. Returns the streams, which may be
  // others than before.
  TensorView turn(const StepContext& context, const TensorView& streams, const TensorView& output,
                  HyperConnection::Coefficients& coefficients, TensorView& y) const;

  std::string prefix_;
  HyperConnection attention_site_, moe_site_;
  AttentionLayer attention_;
  MoeLayer moe_;
  ops::Bound<ops::MhcPostPre> turn_;  // post, then pre and norm
  ops::Bound<ops::MhcPostPre> end_;   // combine, then post
};

// Streams to logits: head reduction, norm, output projection.
class OutputHead {
 public:
  // `prefix`: "" or "mtp.0."; the projection is shared and passed to run().
  OutputHead(LayerBuilder& builder, const std::string& prefix);

  // Logits of the tokens `rows` [num_rows] of streams, into `logits` [num_rows, vocab] FP32.
  void run(const StepContext& context, const LinearLayer& projection, const TensorView& streams, const int32_t* rows,
           int64_t num_rows, const TensorView& logits) const;

 private:
  std::string prefix_;
  MixerWeights mixer_;
  ops::Bound<ops::MhcHead> reduce_;
  NormLayer norm_;
};

}  // namespace tessera::model
