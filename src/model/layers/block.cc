// SPDX-License-Identifier: Apache-2.0
#include "model/layers/block.h"

namespace tessera::model {

Block::Block(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool is_hashed, const Bypass& bypass)
    : prefix_(prefix),
      attention_site_(builder, prefix + "hc_attn"),
      moe_site_(builder, prefix + "hc_ffn"),
      attention_norm_(builder, prefix + "attn_norm", prefix + "attn_norm.weight", builder.config.hidden_size),
      moe_norm_(builder, prefix + "ffn_norm", prefix + "ffn_norm.weight", builder.config.hidden_size),
      attention_(builder, prefix + "attn.", ratio, !bypass.compressed_entries),
      moe_(builder, prefix + "ffn.", is_hashed, bypass) {}

void Block::run(const StepContext& context, size_t layer, const TensorView& streams) const {
  const ArenaScope scope(context.arena);
  const int64_t n = context.num_tokens();
  HyperConnection::Coefficients coefficients{};
  context.trace(prefix_, "in", streams);
  {
    const ArenaScope sublayer(context.arena);
    const TensorView y = attention_site_.read(context, streams, coefficients);
    attention_norm_.run(context, y, y, n);
    const TensorView o = attention_.run(context, layer, y);
    context.trace(prefix_, "attn_out", o);
    attention_site_.write(context, streams, o, coefficients);
    context.trace(prefix_, "mid", streams);
  }
  const TensorView y = moe_site_.read(context, streams, coefficients);
  moe_norm_.run(context, y, y, n);
  const TensorView o = moe_.run(context, y);
  context.trace(prefix_, "ffn_out", o);
  moe_site_.write(context, streams, o, coefficients);
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
