// SPDX-License-Identifier: Apache-2.0
#include "model/layers/token_run.h"

#include <algorithm>

#include "base/integer_math.h"
#include "model/layers/rank_sum.h"
#include "model/layers/step_context.h"

namespace tessera::model {

TokenRun cut_tokens(comm::Communicator& comm, int64_t num_tokens) {
  const int64_t rows = ceil_div<int64_t>(num_tokens, comm.world()), first = comm.rank() * rows;
  if ((comm.world() - 1) * rows >= num_tokens) return {};
  return {&comm, num_tokens, rows, first, std::min(rows, num_tokens - first)};
}

TensorView gather_tokens(const StepContext& context, const TensorView& own) {
  const TokenRun& run = context.run;
  const TensorView all = context.take(own.dtype, {run.all_rows(), own.shape[1]});
  run.comm->all_gather(own, all, context.queue);
  return rows_of(all, 0, run.num_tokens);
}

TensorView own_tokens(const StepContext& context, const RankSum& sum, const TensorView& all) {
  const TokenRun& run = context.run;
  if (!sum.is_needed()) return rows_of(all, run.first, run.count);
  const TensorView own = context.take(context.activation, {run.rows, all.shape[1]});
  run.comm->reduce_scatter(all, own, context.queue);
  return rows_of(own, 0, run.count);
}

}  // namespace tessera::model
