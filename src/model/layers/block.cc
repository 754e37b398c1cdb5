// SPDX-License-Identifier: Apache-2.0
#include "model/layers/block.h"

namespace tessera::model {

namespace {

// That a kernel saves which makes a sum over ranks of what post takes: the sum's own, and behind experts combine's.
constexpr int kLaunchesOfTurn = 1, kLaunchesOfEnd = 2;

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
  ops::MhcPostPre::Desc turn{.mhc = mhc, .combine = {}, .has_post = true, .norm = norm.op().desc};
  const std::vector<ops::Chosen> parts_of_turn = {attention_site_.post().chosen(), moe_site_.pre().chosen(),
                                                  norm.op().chosen()};
  turn_ = builder.bind_fused<ops::MhcPostPre>(prefix + "turn", turn, parts_of_turn);
  const auto has_peers = [](const RankSum& sum, DType in, int num_launches) {
    return sum.is_needed() && sum.peers(in, 0, num_launches) != nullptr;
  };
  if (has_peers(attention_.output_sum(), DType::kF32, kLaunchesOfTurn)) {
    turn.sums_ranks = true;
    turn_of_ranks_ = builder.bind_fused<ops::MhcPostPre>(prefix + "turn_of_ranks", turn, parts_of_turn);
  }
  // It reads the streams where others write them: that must be another array, which turn_ sees to.
  const bool begins = follows_block && turn_.is_bound();
  const std::vector<ops::Chosen> parts_of_begin = {moe_site_.post().chosen(), attention_site_.pre().chosen(),
                                                   attention_site_.norm().op().chosen()};
  const ops::MhcPostPre::Desc begin{
      .mhc = mhc, .combine = {}, .has_post = true, .norm = attention_site_.norm().op().desc};
  const bool sums_ranks = moe_.output_sum().is_needed();
  if (begins && sums_ranks) {
    begin_of_sum_ = builder.bind_fused<ops::MhcPostPre>(prefix + "begin_of_sum", begin, parts_of_begin);
  }
  if (sums_ranks && !has_peers(moe_.output_sum(), mhc.activation, kLaunchesOfEnd)) return;
  end_ = builder.bind_fused<ops::MhcPostPre>(
      prefix + "end",
      {.mhc = mhc, .combine = moe_.combine().desc, .has_post = true, .norm = {}, .sums_ranks = sums_ranks},
      {moe_.combine().chosen(), moe_site_.post().chosen()});
  if (!begins) return;
  ops::MhcPostPre::Desc combining = begin;
  combining.combine = moe_.combine().desc, combining.sums_ranks = sums_ranks;
  std::vector<ops::Chosen> parts = parts_of_begin;
  parts.push_back(moe_.combine().chosen());
  begin_ = builder.bind_fused<ops::MhcPostPre>(prefix + "begin", combining, parts);
}

const device::PeerView* Block::peers_of_turn(const StepContext& context) const {
  if (!turn_of_ranks_.is_bound() || context.tracer != nullptr) return nullptr;
  const int64_t count = context.num_tokens() * turn_of_ranks_.desc.mhc.hidden;
  return attention_.output_sum().peers(DType::kF32, count, kLaunchesOfTurn);
}

TensorView Block::turn(const StepContext& context, const TensorView& streams, const TensorView& output,
                       const device::PeerView* peers, HyperConnection::Read& read) const {
  const HyperConnection::Coefficients coefficients = read.coefficients;
  const ops::Bound<ops::MhcPostPre>& fused = peers != nullptr ? turn_of_ranks_ : turn_;
  if (!fused.is_bound() || context.tracer != nullptr) {
    attention_site_.write(context, streams, output, coefficients, streams);
    context.trace(prefix_, "mid", streams);
    read = moe_site_.read(context, streams);
    return streams;
  }
  const TensorView mid = context.take(context.activation, streams.shape);
  read = moe_site_.take_read(context);
  fused.run({.combine = {},
             .post = HyperConnection::write_args(streams, output, coefficients, mid),
             .pre = moe_site_.read_args(context, mid, read),
             .weight = moe_site_.norm().weight(),
             .peers = peers,
             .num_tokens = streams.shape[0],
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
  const bool is_fused = context.tracer == nullptr && (peers != nullptr || !sums_ranks);
  if (is_fused && next != nullptr && next->begin_.is_bound()) {
    next->begin_.run({.combine = parts,
                      .post = write,
                      .pre = next->attention_site_.read_args(context, write.out, handover.read),
                      .weight = next->attention_site_.norm().weight(),
                      .peers = peers,
                      .num_tokens = n,
                      .workspace = context.workspace},
                     context.queue);
    handover.is_there = true;
    return;
  }
  if (is_fused && end_.is_bound()) {
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
  if (context.run.is_cut()) return run_cut(context, layer, streams, next, handover);
  const ArenaScope scope(context.arena);
  context.trace(prefix_, "in", streams);
  HyperConnection::Read read = handover.is_there ? handover.read : attention_site_.read(context, streams);
  handover.is_there = false;
  const int64_t hidden = attention_site_.pre().desc.hidden;
  const device::PeerView* peers = peers_of_turn(context);
  const TensorView attended =
      context.take(peers != nullptr ? DType::kF32 : context.activation, {context.num_tokens(), hidden});
  attention_.run(context, layer, read.y, attended, peers != nullptr);
  context.trace(prefix_, "attn_out", attended);
  const TensorView mid = turn(context, streams, attended, peers, read);
  const ops::MoeCombine::Args parts = moe_.run(context, read.y, context.take_rows(hidden));
  end(context, parts, HyperConnection::write_args(mid, parts.out, read.coefficients, streams), next, handover);
}

void Block::run_cut(const StepContext& context, size_t layer, const TensorView& streams, const Block* next,
                    Handover& handover) const {
  const ArenaScope scope(context.arena);
  const int64_t rows = context.run.all_rows(), hidden = attention_site_.pre().desc.hidden;
  HyperConnection::Read read = handover.is_there ? handover.read : attention_site_.read(context, streams);
  handover.is_there = false;
  TensorView attended;
  if (attention_.has_all_heads()) {
    attended = context.take(context.activation, {context.run.count, hidden});
    attention_.run_own(context, layer, rows_of(read.y, 0, context.run.count), attended);
  } else {
    const TensorView all = gather_tokens(context, read.y), summands = context.take(DType::kF32, {rows, hidden});
    attention_.run(context, layer, all, rows_of(summands, 0, context.num_tokens()), true);
    attended = own_tokens(context, attention_.output_sum(), summands);
  }
  const TensorView mid = turn(context, streams, attended, nullptr, read);
  const TensorView combined = context.take(context.activation, {rows, hidden});
  moe_.combine().run(moe_.run(context, gather_tokens(context, read.y), rows_of(combined, 0, context.num_tokens())),
                     context.queue);
  const TensorView output = own_tokens(context, moe_.output_sum(), combined);
  const ops::MhcPost::Args write = HyperConnection::write_args(mid, output, read.coefficients, streams);
  if (next == nullptr || !next->begin_of_sum_.is_bound()) return moe_site_.post().run(write, context.queue);
  next->begin_of_sum_.run({.combine = {},
                           .post = write,
                           .pre = next->attention_site_.read_args(context, streams, handover.read),
                           .weight = next->attention_site_.norm().weight(),
                           .num_tokens = streams.shape[0],
                           .workspace = context.workspace},
                          context.queue);
  handover.is_there = true;
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

void OutputHead::run(const StepContext& context, const VocabularyHead& projection, const TensorView& streams,
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
  projection.run(context, h, logits, num_rows);
}

}  // namespace tessera::model
