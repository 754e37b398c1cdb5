// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "model/runner.h"

namespace tessera::model {

// Throws kInternal for draws that no step makes: after no token, from a mask of another size than the vocabulary's, or
// with more than kMaxMasksPerStep different masks.
void check_draws(std::span<const SequenceSlice> slices, int32_t vocab_size);

}  // namespace tessera::model
