// SPDX-License-Identifier: Apache-2.0
#pragma once
// How tokens are chosen: a request's parameters, checked once, and the requests to the runner that follow from them.
// The draw depends on (seed, position) alone, so a request with a seed repeats exactly.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/runner.h"

namespace tessera::engine {

struct SamplingOptions {
  model::SamplingParams params{};
  std::vector<std::pair<int32_t, float>> logit_bias{};  // (token id, added to its logit)
};

// What is wrong with the options for a vocabulary of that size, in words with field, expected and found; nothing where
// they are fine.
std::optional<std::string> find_fault(const SamplingOptions& options, int32_t vocab_size);

class Sampler {
 public:
  // `options` must be without fault.
  Sampler(const SamplingOptions& options, int32_t vocab_size);

  // The draw of the token of `position` that a step can make; nothing where draw() alone can, because it takes counts
  // or bias.
  std::optional<model::Draw> draw_in_step(int64_t position) const;
  // Counts a token of the context for the penalties.
  void observe(int32_t id);
  // Draws the token of `position` from one row of logits. `mask`: as SampleRequest's.
  int32_t draw(model::Runner& runner, std::span<const float> logits, int64_t position,
               std::span<const uint32_t> mask = {}) const;
  // The token that a step drew. Throws kNotFinite where it could not.
  static int32_t drawn(const model::Draw& draw);

 private:
  model::SamplingParams params_;
  std::vector<int32_t> bias_ids_;
  std::vector<float> bias_values_;
  bool has_penalties_;
  std::vector<int32_t> counts_;  // [vocab], with penalties only
};

}  // namespace tessera::engine
