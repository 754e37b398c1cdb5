// SPDX-License-Identifier: Apache-2.0
#pragma once
// One layer: attention and mixture of experts, each inside its hyper-connection; and the head that ends a stack.
#include "model/layers/attention_layer.h"
#include "model/layers/hyper_connection.h"
#include "model/layers/moe_layer.h"
#include "model/layers/vocabulary_head.h"

namespace tessera::model {

class Block {
 public:
  // What the end of a block leaves for the next one of a stack, which then need not read the streams itself.
  struct Handover {
    HyperConnection::Read read;
    bool is_there = false;
  };

  // `prefix`: "layers.2." or "mtp.0.". `follows_block`: another's end may leave it a handover.
  Block(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool is_hashed, const Bypass& bypass,
        bool follows_block);

  // An empty one, with memory from the arena.
  Handover take_handover(const StepContext& context) const { return {attention_site_.take_read(context)}; }
  // streams [tokens, 4, hidden] in place; `layer` is the index of this block's caches. `next`: the block behind this
  // one in a stack, null for the last. Of a step whose tokens are cut over ranks: streams [run.count, 4, hidden], this
  // rank's.
  void run(const StepContext& context, size_t layer, const TensorView& streams, const Block* next,
           Handover& handover) const;
  // A block by itself.
  void run(const StepContext& context, size_t layer, const TensorView& streams) const;
  LayerCacheLayout cache_layout() const { return attention_.cache_layout(); }
  // For steps whose tokens are cut; once (AttentionLayer::prepare_own_tokens).
  void prepare_own_tokens(LayerBuilder& builder) { attention_.prepare_own_tokens(builder); }

 private:
  void run_cut(const StepContext& context, size_t layer, const TensorView& streams, const Block* next,
               Handover& handover) const;
  // Where turn() makes the sum over ranks of attention's output itself; null where attention does, or there is none.
  const device::PeerView* peers_of_turn(const StepContext& context) const;
  // Between the sublayers: writes attention's output and reads the experts' input into `read`, which was attention's.
  // `peers`: the output is this rank's summand. Returns the streams, which may be others than before.
  TensorView turn(const StepContext& context, const TensorView& streams, const TensorView& output,
                  const device::PeerView* peers, HyperConnection::Read& read) const;
  // Combines experts and writes the streams, and reads them for `next` where that is one op.
  void end(const StepContext& context, const ops::MoeCombine::Args& parts, const ops::MhcPost::Args& write,
           const Block* next, Handover& handover) const;

  std::string prefix_;
  HyperConnection attention_site_, moe_site_;
  AttentionLayer attention_;
  MoeLayer moe_;
  ops::Bound<ops::MhcPostPre> begin_;         // of the block before combine, a sum over ranks and post; pre and norm
  ops::Bound<ops::MhcPostPre> begin_of_sum_;  // the same behind a sum over ranks that is there: post, then pre and norm
  ops::Bound<ops::MhcPostPre> turn_;          // post, then pre and norm
  ops::Bound<ops::MhcPostPre> turn_of_ranks_;  // the same behind a sum over ranks
  ops::Bound<ops::MhcPostPre> end_;            // combine, then post
};

// Streams to logits: head reduction, norm, output projection.
class OutputHead {
 public:
  // `prefix`: "" or "mtp.0."; the projection is shared and passed to run().
  OutputHead(LayerBuilder& builder, const std::string& prefix);

  // Logits of the tokens `rows` [num_rows] of streams, into `logits` [num_rows, vocab] FP32.
  void run(const StepContext& context, const VocabularyHead& projection, const TensorView& streams, const int32_t* rows,
           int64_t num_rows, const TensorView& logits) const;

 private:
  std::string prefix_;
  MixerWeights mixer_;
  ops::Bound<ops::MhcHead> reduce_;
  NormLayer norm_;
};

}  // namespace tessera::model
