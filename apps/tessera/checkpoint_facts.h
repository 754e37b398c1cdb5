// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which checkpoint a rank has, for ranks to compare.
#include <string>
#include <vector>

#include "comm/agreement.h"

namespace tessera::app {

// Hashes of config.json, and of each file of weights: of its tensors' names, types, shapes and places, and of their
// bytes, all of them up to 256 MiB of weights, of more some bytes of up to 256 tensors (two checkpoints of one
// architecture have the same headers).
std::vector<comm::Fact> checkpoint_facts(const std::string& directory);

}  // namespace tessera::app
