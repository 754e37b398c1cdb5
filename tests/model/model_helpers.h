// SPDX-License-Identifier: Apache-2.0
#pragma once
// Loading and running models in tests.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "model/load_model.h"
#include "model/model.h"
#include "testing/test_machine.h"

namespace tessera::testing {

model::LoadedModel load(const std::string& folder, ops::InputMode input, ops::CacheMode cache, int num_threads = 2,
                        int64_t max_step_tokens = 64);
// The same on `machine`; without fused ops where they are unwanted.
model::LoadedModel load_fused(const std::string& folder, ops::Precision precision, const device::Machine& machine,
                              bool is_fused);

// How many ops of the plan are fused ones.
int num_fused(const model::LoadedModel& loaded);

// Feeds ids in chunks of at most `chunk` (0: as large as a step takes); returns the requested logits of all chunks.
std::vector<float> feed(model::Runner& runner, model::SequenceState& state, std::span<const int32_t> ids,
                        model::LogitRows rows, int64_t chunk = 0);

// `count` ids below `vocab`.
std::vector<int32_t> random_ids(Rng& rng, int64_t count, int32_t vocab);

// Index of the largest value, the lower one at a tie.
int32_t argmax(std::span<const float> row);

}  // namespace tessera::testing
