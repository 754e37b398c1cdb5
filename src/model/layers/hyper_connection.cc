// SPDX-License-Identifier: Apache-2.0
#include "model/layers/hyper_connection.h"

namespace tessera::model {

ops::MhcDesc mhc_desc(const LayerBuilder& builder) {
  return {.hidden = builder.config.hidden_size,
          .sinkhorn_iterations = static_cast<int>(builder.config.hc_sinkhorn_iters),
          .hc_eps = static_cast<float>(builder.config.hc_eps),
          .norm_eps = static_cast<float>(builder.config.rms_norm_eps),
          .activation = builder.activation()};
}

MixerWeights::MixerWeights(LayerBuilder& builder, const std::string& prefix)
    : fn(builder.weights.load_vector(prefix + "_fn")),
      base(builder.weights.load_vector(prefix + "_base")),
      scale(builder.weights.load_vector(prefix + "_scale")) {}

HyperConnection::HyperConnection(LayerBuilder& builder, const std::string& prefix)
    : prefix_(prefix),
      pre_(builder.bind<ops::MhcPre>(prefix + ".pre", mhc_desc(builder))),
      post_(builder.bind<ops::MhcPost>(prefix + ".post", mhc_desc(builder))),
      weights_(builder, prefix) {}

TensorView HyperConnection::read(const StepContext& context, const TensorView& streams,
                                 Coefficients& coefficients) const {
  const int64_t n = context.num_tokens();
  const TensorView post = context.take(DType::kF32, {n, ops::kHcStreams});
  const TensorView comb = context.take(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams});
  const TensorView y = context.take_rows(pre_.desc.hidden);
  coefficients = {post.as<float>(), comb.as<float>()};
  pre_.run({.x = streams,
            .fn = weights_.fn.as<float>(),
            .base = weights_.base.as<float>(),
            .scale = weights_.scale.as<float>(),
            .y = y,
            .post = coefficients.post,
            .comb = coefficients.comb,
            .num_tokens = n,
            .workspace = context.workspace},
           context.queue);
  context.trace(prefix_, ".read", y);
  context.trace(prefix_, ".post", post);
  context.trace(prefix_, ".comb", comb);
  return y;
}

void HyperConnection::write(const StepContext& context, const TensorView& streams, const TensorView& output,
                            const Coefficients& coefficients) const {
  post_.run({.x = streams,
             .o = output,
             .post = coefficients.post,
             .comb = coefficients.comb,
             .out = streams,
             .num_tokens = context.num_tokens()},
            context.queue);
}

}  // namespace tessera::model
