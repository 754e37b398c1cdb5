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

HyperConnection::HyperConnection(LayerBuilder& builder, const std::string& prefix, const std::string& norm)
    : prefix_(prefix),
      pre_(builder.bind<ops::MhcPre>(prefix + ".pre", mhc_desc(builder))),
      post_(builder.bind<ops::MhcPost>(prefix + ".post", mhc_desc(builder))),
      weights_(builder, prefix),
      norm_(builder, norm, norm + ".weight", builder.config.hidden_size),
      read_(builder.bind_fused<ops::MhcPostPre>(prefix + ".read",
                                                {.mhc = pre_.desc, .combine = {}, .norm = norm_.op().desc},
                                                {pre_.chosen(), norm_.op().chosen()})) {}

HyperConnection::Read HyperConnection::take_read(const StepContext& context) const {
  const int64_t n = context.stream_rows();
  const TensorView post = context.take(DType::kF32, {n, ops::kHcStreams});
  const TensorView comb = context.take(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams});
  return {context.take(context.activation, {n, pre_.desc.hidden}), {post.as<float>(), comb.as<float>()}};
}

ops::MhcPre::Args HyperConnection::read_args(const StepContext& context, const TensorView& streams,
                                             const Read& read) const {
  return {.x = streams,
          .fn = weights_.fn.as<float>(),
          .base = weights_.base.as<float>(),
          .scale = weights_.scale.as<float>(),
          .y = read.y,
          .post = read.coefficients.post,
          .comb = read.coefficients.comb,
          .num_tokens = streams.shape[0],
          .workspace = context.workspace};
}

ops::MhcPost::Args HyperConnection::write_args(const TensorView& streams, const TensorView& output,
                                               const Coefficients& coefficients, const TensorView& out) {
  return {.x = streams,
          .o = output,
          .post = coefficients.post,
          .comb = coefficients.comb,
          .out = out,
          .num_tokens = streams.shape[0]};
}

HyperConnection::Read HyperConnection::read(const StepContext& context, const TensorView& streams) const {
  const int64_t n = streams.shape[0];
  const Read read = take_read(context);
  const ops::MhcPre::Args args = read_args(context, streams, read);
  if (read_.is_bound() && context.tracer == nullptr) {
    read_.run({.combine = {},
               .post = {},
               .pre = args,
               .weight = norm_.weight(),
               .num_tokens = n,
               .workspace = context.workspace},
              context.queue);
    return read;
  }
  pre_.run(args, context.queue);
  context.trace(prefix_, ".read", args.y);
  context.trace(prefix_, ".post", {args.post, DType::kF32, {n, ops::kHcStreams}});
  context.trace(prefix_, ".comb", {args.comb, DType::kF32, {n, ops::kHcStreams, ops::kHcStreams}});
  norm_.run(context, args.y, args.y, n);
  return read;
}

void HyperConnection::write(const StepContext& context, const TensorView& streams, const TensorView& output,
                            const Coefficients& coefficients, const TensorView& out) const {
  post_.run(write_args(streams, output, coefficients, out), context.queue);
}

}  // namespace tessera::model
