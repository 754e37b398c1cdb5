// SPDX-License-Identifier: Apache-2.0
#include "model/layers/block.h"

namespace tessera::model {

namespace {

// Combine's and the sum's, which a kernel that makes the sum behind experts saves.
constexpr int kLaunchesOfEnd = 2;

}  // namespace

Block::Block(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool is_hashed, const Bypass& bypass,
             bool follows_block)
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
  if (sums_ranks && moe_.output_sum().peers(mhc.activation, 0, kLaunchesOfEnd) == nullptr) return;
  end_ = builder.bind_fused<ops::MhcPostPre>(
      prefix + "end",
      {.mhc = mhc, .combine = moe_.combine().desc, .has_post = true, .norm = {}, .sums_ranks = sums_ranks},
      {moe_.combine().chosen(), moe_site_.post().chosen()});
  // It reads the streams where others write them: that must be another array, which turn_ sees to.
  if (!follows_block || sums_ranks || !turn_.is_bound()) return;
  begin_ = builder.bind_fused<ops::MhcPostPre>(
      prefix + "begin", {.mhc = mhc, .combine = moe_.combine().desc, .has_post = true, .norm = norm.op().desc},
      {moe_.combine().chosen(), moe_site_.post().chosen(), attention_site_.pre().chosen(),
       attention_site_.norm().op().chosen()});
}

TensorView Block::turn(const StepContext& context, const TensorView& streams, const TensorView& output,
                       HyperConnection::Read& read) const {
  const HyperConnection::Coefficients coefficients = read.coefficients;
  if (!turn_.is_bound() || context.tracer != nullptr) {
    attention_site_.write(context, streams, output, coefficients, streams);
    context.trace(prefix_, "mid", streams);
    read = moe_site_.read(context, streams);
    return streams;
  }
  const TensorView mid = context.take(context.activation, streams.shape);
  read = moe_site_.take_read(context);
  turn_.run({.combine = {},
             .post = HyperConnection::write_args(context, streams, output, coefficients, mid),
             .pre = moe_site_.read_args(context, mid, read),
             .weight = moe_site_.norm().weight(),
             .num_tokens = context.num_tokens(),
             .workspace = context.workspace},
            context.queue);
  return mid;
}

void Block::end(const StepContext& context, const ops::MoeCombine::Args& parts, const ops::MhcPost::Args& write,
                const Block* next, Handover& handover) const {
  const bool sums_ranks = moe_.output_sum().is_needed();
  const device::PeerView* peers =
      sums_ranks ? moe_.output_sum().peers(parts.out.dtype, parts.out.shape.num_elements(), kLaunchesOfEnd) : nullptr;
  const int64_t n = context.num_tokens();
  if (context.tracer == nullptr && next != nullptr && next->begin_.is_bound()) {
    next->begin_.run({.combine = parts,
                      .post = write,
                      .pre = next->attention_site_.read_args(context, write.out, handover.read),
                      .weight = next->attention_site_.norm().weight(),
                      .num_tokens = n,
                      .workspace = context.workspace},
                     context.queue);
    handover.is_there = true;
    return;
  }
  if (context.tracer == nullptr && end_.is_bound() && (peers != nullptr || !sums_ranks)) {
    end_.run({.combine = parts,
              .post = write,
              .pre = {},
              .weight = {},
              .peers = peers,
              .num_tokens = n,
              .workspace = context.workspace},
             context.queue);
    return;
  }
  moe_.combine().run(parts, context.queue);
  if (sums_ranks) moe_.output_sum().run(context, parts.out, parts.out);
  context.trace(prefix_, "ffn_out", parts.out);
  moe_site_.post().run(write, context.queue);
  context.trace(prefix_, "out", write.out);
}

void Block::run(const StepContext& context, size_t layer, const TensorView& streams, const Block* next,
                Handover& handover) const {
  const ArenaScope scope(context.arena);
  context.trace(prefix_, "in", streams);
  HyperConnection::Read read = handover.is_there ? handover.read : attention_site_.read(context, streams);
  handover.is_there = false;
  const TensorView attended = attention_.run(context, layer, read.y);
  context.trace(prefix_, "attn_out", attended);
  const TensorView mid = turn(context, streams, attended, read);
  const ops::MoeCombine::Args parts = moe_.run(context, read.y);
  end(context, parts, HyperConnection::write_args(context, mid, parts.out, read.coefficients, streams), next, handover);
}

void Block::run(const StepContext& context, size_t layer, const TensorView& streams) const {
  Handover none;
  run(context, layer, streams, nullptr, none);
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
