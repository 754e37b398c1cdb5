// SPDX-License-Identifier: Apache-2.0
#pragma once
// The output projection, hidden values to logits, whose rows several ranks share: each computes the logits of its part
// of the vocabulary, and all gather them (docs/decisions/0031-several-gpus.md). The field's name for it is a
// vocabulary-parallel head. A logit is computed whole, by one rank: its bits are those of one rank that has all.
#include "comm/communicator.h"
#include "model/layers/linear_layer.h"

namespace tessera::model {

class VocabularyHead {
 public:
  // Rows of logits that are gathered at once: the scratch of a step that wants all of thousands need not be as large as
  // they are.
  static constexpr int64_t kGatheredRows = 128;

  VocabularyHead() = default;
  // Loads and binds "head". One rank has all of it, and so have ranks that do not divide the vocabulary or would
  // part an FP8 head's blocks of rows (slice_of()).
  explicit VocabularyHead(LayerBuilder& builder);

  // h [num_rows, hidden] of the activations' type -> logits [num_rows, vocab] F32, all of them on every rank, which all
  // call it with as many rows. Scratch comes from the step's arena and goes back. Errors: those of
  // Communicator::all_gather().
  void run(const StepContext& context, const TensorView& h, const TensorView& logits, int64_t num_rows) const;

  // Among how many ranks it is cut; 1: it is whole.
  int64_t num_parts() const { return comm_ == nullptr ? 1 : comm_->world(); }
  // Of the arena, for `num_rows` of a vocabulary that is cut over `num_parts` ranks.
  static int64_t scratch_bytes(int64_t vocab, int64_t num_parts, int64_t num_rows);

 private:
  LinearLayer projection_;
  comm::Communicator* comm_ = nullptr;  // of those among which it is cut
};

}  // namespace tessera::model
