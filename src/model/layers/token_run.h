// SPDX-License-Identifier: Apache-2.0
#pragma once
// Steps of many tokens on several ranks: what is done token by token around the sublayers (hyper-connections and norms)
// each rank does for a run of the tokens, and has the streams of those alone ("sequence parallelism"). The input of a
// sublayer is gathered from all ranks (but of attention as below), and of an output whose summands ranks have each adds
// up its own tokens'. Where every rank needs the indexer's choice of all tokens it is made by one for each and gathered
// too; with all heads (attention_heads.h) attention is of a rank's own tokens as well, maps of its input too, and what
// caches take of those is gathered in place of the input. A token's values are those that it has where every rank does
// all: who computes them, and beside whom, changes no bit. Source: docs/decisions/0031-several-gpus.md; Korthikanti et
// al. 2022 (arXiv:2205.05198), section 4.2.2.
#include <cstdint>

#include "comm/communicator.h"
#include "tensor/tensor_view.h"

namespace tessera::model {

struct StepContext;
class RankSum;

struct TokenRun {
  comm::Communicator* comm = nullptr;  // null: tokens are not cut, every rank has all
  int64_t num_tokens = 0;              // of the step
  int64_t rows = 0;                    // of each rank: its tokens and, on the last ones, rows that are nobody's
  int64_t first = 0, count = 0;        // this rank's tokens

  bool is_cut() const { return comm != nullptr; }
  int64_t all_rows() const { return comm->world() * rows; }
};

// Runs of a step, which every rank has the same of; whole where some rank would have no token.
TokenRun cut_tokens(comm::Communicator& comm, int64_t num_tokens);

// In a step whose tokens are cut, of arrays [rows, ...] of every rank: those of all tokens, from the arena.
TensorView gather_tokens(const StepContext& context, const TensorView& own);
// Of a sublayer's output [all_rows, hidden], whose rows behind the tokens may be anything: this rank's tokens'. Where
// ranks have summands (`sum` is needed) they are added up, into memory from the arena.
TensorView own_tokens(const StepContext& context, const RankSum& sum, const TensorView& all);

}  // namespace tessera::model
