// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks must have in common before they compute together: the same checkpoint, precision, split and kernels, on
// which "the same logits on each rank" rests.
#include <span>
#include <string>

#include "comm/bootstrap.h"

namespace tessera::comm {

struct Fact {
  std::string name;   // "--mode"
  std::string value;  // "a16"; short, for the message
};

// All ranks call it together, each with its facts. Throws kInvalidArgument with the same words on every rank, the first
// fact in which the first rank differs from rank 0: 'rank 1 of 2 differs from rank 0 in --mode: expected "a16", found
// "a4"'.
void agree(Bootstrap& bootstrap, std::span<const Fact> facts);

// What no two ranks may have in common: their GPU. All call it together. Throws kInvalidArgument with the same words on
// every rank: 'ranks 0 and 1 of 2 have the same GPU "GPU-8a..": ADVICE'.
void differ(Bootstrap& bootstrap, const Fact& fact, const std::string& advice);

}  // namespace tessera::comm
