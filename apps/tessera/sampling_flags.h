// SPDX-License-Identifier: Apache-2.0
#pragma once
// The flags that say how tokens are drawn and where an answer ends.
#include <cstdint>
#include <string>
#include <vector>

#include "engine/sampler.h"

namespace CLI {
class App;
}

namespace tessera::app {

struct SamplingFlags {
  int64_t max_tokens = 256;
  model::SamplingParams params;
  std::string seed;  // empty: a new one
  std::vector<std::string> stops, logit_bias;
};

// Adds --max-tokens, --temperature, ..., --seed and --stop. `flags` must outlive `command`.
void add_sampling_flags(CLI::App& command, SamplingFlags& flags);

// Throws kInvalidArgument where a stop string is empty or long, or there are too many.
void check_stops(const std::vector<std::string>& stops);

// The seed given, or a new one. Throws kInvalidArgument for what is no number of 64 bits.
uint64_t choose_seed(const std::string& text);

// A note on stderr about flags that were given and have no effect on greedy sampling.
void note_idle_flags(const CLI::App& command, const SamplingFlags& flags);

// What the engine takes. Throws kInvalidArgument for a malformed --logit-bias; ranges are checked by the engine.
engine::SamplingOptions sampling_options(const SamplingFlags& flags, uint64_t seed);

}  // namespace tessera::app
