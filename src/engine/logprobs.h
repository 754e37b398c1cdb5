// SPDX-License-Identifier: Apache-2.0
#pragma once
// Logarithms of probabilities out of logits.
#include "engine/request.h"

namespace tessera::engine {

// Of `id`, which lies in the row, and of the `num_likeliest` largest of the row (fewer where it is shorter):
// log-softmax in FP64, rounded once. `row` is FP32 logits [vocab], all finite.
Logprobs logprobs_of(std::span<const float> row, int32_t id, int num_likeliest);

}  // namespace tessera::engine
