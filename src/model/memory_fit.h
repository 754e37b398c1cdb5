// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether a model fits, before any weight is read or made.
#include <cstdint>
#include <string>

#include "device/machine.h"
#include "model/config.h"
#include "ops/precision.h"

namespace tessera::model {

// Rows of a step whose window entries lie in a ring at once: attention of a larger step takes them one after the other,
// so that a sequence pays for these, whatever a step takes (docs/performance/prefill.md, "Rings of 512 rows").
constexpr int64_t kRingRows = 512;

// Slots of a sequence's ring in a model whose steps take up to `step_tokens`.
int64_t ring_slots(const Config& config, int64_t step_tokens);

// What a sequence of `tokens` keeps: an upper estimate in the widest layout.
// Of compressed entries, which `ranks` have among them, a rank's part.
uint64_t sequence_bytes(const Config& config, const ops::Precision& precision, int64_t tokens, int64_t window_slots,
                        int64_t ranks = 1);

// Of the folder's shards, as far as the file system tells.
uint64_t file_bytes(const std::string& directory);

// Bytes that caches may take of what is free beside the folder's shards and `step` bytes of work space: four fifths.
int64_t room_for_caches(const std::string& directory, const device::Machine& machine, uint64_t step);

// Throws kResourceExhausted with every figure where the sum exceeds what the machine has free. `padding`: what of the
// weights is that of kernels' units.
void check_fit(uint64_t weights, uint64_t state, uint64_t work, const device::Machine& machine, uint64_t padding = 0);

}  // namespace tessera::model
