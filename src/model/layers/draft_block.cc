// SPDX-License-Identifier: Apache-2.0
#include "model/layers/draft_block.h"

namespace tessera::model {

DraftBlock::DraftBlock(LayerBuilder& builder, const std::string& prefix)
    : prefix_(prefix),
      embedding_norm_(builder, prefix + "enorm", prefix + "enorm.weight", builder.config.hidden_size),
      stream_norm_(builder, prefix + "hnorm", prefix + "hnorm.weight", builder.config.hidden_size),
      e_proj_(builder, prefix + "e_proj", InputRole::kQuantised, builder.activation()),
      h_proj_(builder, prefix + "h_proj", InputRole::kQuantised, builder.activation()),
      add_(builder.bind<ops::StreamAdd>(
          prefix + "add",
          {.hidden = builder.config.hidden_size, .streams = ops::kHcStreams, .activation = builder.activation()})),
      // Window only, plain RoPE, a learned router.
      block_(builder, prefix, 0, false, Bypass{}, false),
      head_(builder, prefix) {}

TensorView DraftBlock::run(const StepContext& context, size_t layer, const TensorView& streams,
                           const TensorView& next) const {
  const int64_t n = context.num_tokens(), hidden = add_.desc.hidden;
  const TensorView e = context.take_rows(hidden);
  embedding_norm_.run(context, next, e, n);
  const TensorView projected = e_proj_.run(context, e, n);
  // Each stream is normalised by itself.
  const TensorView h = context.take(context.activation, {n * ops::kHcStreams, hidden});
  stream_norm_.run(context, streams, h, n * ops::kHcStreams);
  const TensorView z = reshape(h_proj_.run(context, h, n * ops::kHcStreams), {n, ops::kHcStreams, hidden});
  add_.run({.z = z, .e = projected, .out = z, .num_tokens = n}, context.queue);
  block_.run(context, layer, z);
  return z;
}

}  // namespace tessera::model
