// SPDX-License-Identifier: Apache-2.0
#include "model/layers/block.h"

namespace tessera::model {

Block::Block(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool is_hashed, const Bypass& bypass)
    : prefix_(prefix),
      attention_site_(builder, prefix + "hc_attn", prefix + "attn_norm"),
      moe_site_(builder, prefix + "hc_ffn", prefix + "ffn_norm"),
      attention_(builder, prefix + "attn.", ratio, !bypass.compressed_entries),
      moe_(builder, prefix + "ffn.", is_hashed, bypass) {
  const ops::MhcDesc& mhc = moe_site_.pre().desc;
  const NormLayer& norm = moe_site_.norm();
  turn_ = builder.bind_fused<ops::MhcPostPre>(
      prefix + "turn", {.mhc = mhc, .combine = {}, .has_post = true, .norm = norm.op().desc},
      {attention_site_.post().chosen(), moe_site_.pre().chosen(), norm.op().chosen()});
  const bool sums_ranks = moe_.output_sum().is_needed();
  if (sums_ranks && moe_.output_sum().peers(0) == nullptr) return;
  end_ = builder.bind_fused<ops::MhcPostPre>(
      prefix + "end",
      {.mhc = mhc, .combine = moe_.combine().desc, .has_post = true, .norm = {}, .sums_ranks = sums_ranks},
      {moe_.combine().chosen(), moe_site_.post().chosen()});
}

TensorView Block::turn(const StepContext& context, const TensorView& streams, const TensorView& output,
                       HyperConnection::Coefficients& coefficients, TensorView& y) const {
  if (!turn_.is_bound() || context.tracer != nullptr) {
    attention_site_.write(context, streams, output, coefficients, streams);
    context.trace(prefix_, "mid", streams);
    y = moe_site_.read(context, streams, coefficients);
    return streams;
  }
  const TensorView mid = context.take(context.activation, streams.shape);
  const ops::MhcPost::Args post = HyperConnection::write_args(context, streams, output, coefficients, mid);
  const ops::MhcPre::Args pre = moe_site_.read_args(context, mid, coefficients);
  turn_.run({.combine = {},
             .post = post,
             .pre = pre,
             .weight = moe_site_.norm().weight(),
             .num_tokens = context.num_tokens(),
             .workspace = context.workspace},
            context.queue);
  y = pre.y;
  return mid;
}

void Block::run(const StepContext& context, size_t layer, const TensorView& streams) const {
  const ArenaScope scope(context.arena);
  HyperConnection::Coefficients coefficients{};
  context.trace(prefix_, "in", streams);
  TensorView y = attention_site_.read(context, streams, coefficients);
  const TensorView attended = attention_.run(context, layer, y);
  context.trace(prefix_, "attn_out", attended);
  const TensorView mid = turn(context, streams, attended, coefficients, y);
  const ops::MoeCombine::Args parts = moe_.run(context, y);
  const bool sums_ranks = moe_.output_sum().is_needed();
  const device::PeerView* peers = sums_ranks ? moe_.output_sum().peers(parts.out.num_bytes()) : nullptr;
  if (end_.is_bound() && context.tracer == nullptr && (peers != nullptr || !sums_ranks)) {
    end_.run({.combine = parts,
              .post = HyperConnection::write_args(context, mid, parts.out, coefficients, streams),
              .pre = {},
              .weight = {},
              .peers = peers,
              .num_tokens = context.num_tokens(),
              .workspace = context.workspace},
             context.queue);
    return;
  }
  moe_.combine().run(parts, context.queue);
  if (sums_ranks) moe_.output_sum().run(context, parts.out, parts.out);
  context.trace(prefix_, "ffn_out", parts.out);
  moe_site_.write(context, mid, parts.out, coefficients, streams);
  context.trace(prefix_, "out", streams);
}

OutputHead::OutputHead(LayerBuilder& builder, const std::string& prefix)
    : prefix_(prefix),
      mixer_(builder, prefix + "hc_head"),
      reduce_(builder.bind<ops::MhcHead>(prefix + "hc_head", mhc_desc(builder))),
      norm_(builder, prefix + "norm", prefix + "norm.weight", builder.config.hidden_size) {}

void OutputHead::run(const StepContext& context, const LinearLayer& projection, const TensorView& streams,
                     const int32_t* rows, int64_t num_rows, const TensorView& logits) const {
  const ArenaScope scope(context.arena);
  const TensorView h = context.take(context.activation, {num_rows, reduce_.desc.hidden});
  reduce_.run({.x = streams,
               .rows = rows,
               .fn = mixer_.fn.as<float>(),
               .base = mixer_.base.as<float>(),
               .scale = mixer_.scale.as<float>(),
               .h = h,
               .num_rows = num_rows,
               .workspace = context.workspace},
              context.queue);
  context.trace(prefix_, "hc_head", h);
  norm_.run(context, h, h, num_rows);
  projection.run_into(context, h, logits, num_rows);
}

}  // namespace tessera::model
