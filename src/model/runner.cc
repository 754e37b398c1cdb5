// SPDX-License-Identifier: Apache-2.0
#include "model/runner.h"

#include "base/error.h"

namespace tessera::model {

void Runner::queue_step(std::span<const SequenceSlice>) {
  fail(ErrorCode::kInternal, "this runner makes whole steps");
}

bool Runner::queue_next(std::span<Draw* const>) {
  fail(ErrorCode::kInternal, "this runner makes whole steps");
}

TensorView Runner::finish_step() {
  fail(ErrorCode::kInternal, "this runner makes whole steps");
}

}  // namespace tessera::model
