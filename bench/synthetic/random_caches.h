// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sequence as it would be after many tokens, without computing them.
#include <cstdint>

#include "model/config.h"
#include "model/runner.h"

namespace tessera::bench {

// Moves an empty sequence of a model::Model to `position`, a multiple of 128 within its capacity: window, compressed
// entries and indexer keys are encoded random vectors, compressors stand between two windows. num_threads: as
// device::Queue; entries do not depend on it.
void fill_caches(model::SequenceState& state, int64_t position, uint64_t seed, int num_threads = 0);

// Bytes of window, selected entries and indexer keys that the next tokens read in a layer, at least: what several of
// them read counts once, and each selects other entries as far as there are any.
int64_t cache_bytes_read(model::SequenceState& state, size_t layer, const model::Config& config, int64_t tokens = 1);

}  // namespace tessera::bench
