// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps of `sample` that every variant takes as they are; sample.h has the definition.
#include "ops/sample/sample.h"

namespace tessera::ops {

// A token that may be drawn, with its probability relative to the likeliest token's.
struct Candidate {
  double probability;
  int32_t id;
};

// The order in which candidates are looked at: falling probability, ties to the lower id.
inline bool comes_before(const Candidate& a, const Candidate& b) {
  return a.probability > b.probability || (a.probability == b.probability && a.id < b.id);
}

// Changes args.logits.
void apply_bias_and_penalties(const Sample::Desc& desc, const Sample::Args& args);

// exp((logit - top) / temperature); 0 for NaN and minus infinity.
double relative_probability(float logit, float top, float temperature);

// In [0, 1): 53 bits of (seed, position).
double unit_draw(const SamplingParams& params, uint64_t position);

// top-k, min-p, top-p and the draw, over `count` > 0 candidates in order. They are the first of all candidates, and at
// least one more than top-k and min-p keep, unless there are no more.
int32_t draw_candidate(const Candidate* candidates, int64_t count, const SamplingParams& params, uint64_t position);

}  // namespace tessera::ops
