// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps of `sample` that every variant takes as they are; sample.h has the definition.
#include "base/host_device.h"
#include "base/rng.h"
#include "ops/sample/sample.h"

namespace tessera::ops {

// A token that may be drawn, with its probability relative to the likeliest token's.
struct Candidate {
  double probability;
  int32_t id;
};

// The order in which candidates are looked at: falling probability, ties to the lower id.
TESSERA_HOST_DEVICE constexpr bool comes_before(const Candidate& a, const Candidate& b) {
  return a.probability > b.probability || (a.probability == b.probability && a.id < b.id);
}

// Whether a mask, null where there is none, lets a token be drawn.
TESSERA_HOST_DEVICE constexpr bool is_allowed(const uint32_t* mask, int64_t id) {
  return mask == nullptr || (mask[id / 32] >> (id % 32) & 1) != 0;
}

// The mask of a row; null: none.
TESSERA_HOST_DEVICE constexpr const uint32_t* mask_of(const uint32_t* masks, const SampleRow& row, int64_t vocab) {
  return row.mask_row < 0 ? nullptr : masks + row.mask_row * mask_words(vocab);
}

// A logit less its penalties; `count` above 0.
TESSERA_HOST_DEVICE constexpr float penalised(float logit, const SamplingParams& params, int32_t count) {
  const float scaled = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
  return scaled - (params.frequency_penalty * static_cast<float>(count) + params.presence_penalty);
}

// Changes args.logits, on the host.
void apply_bias_and_penalties(const Sample::Desc& desc, const Sample::Args& args);

// exp((logit - top) / temperature); 0 for NaN and minus infinity.
double relative_probability(float logit, float top, float temperature);

// In [0, 1): 53 bits of (seed, position).
TESSERA_HOST_DEVICE constexpr double unit_draw(const SamplingParams& params, uint64_t position) {
  uint32_t words[4] = {};
  philox(params.seed, position, 0, words);
  const uint64_t mantissa = (static_cast<uint64_t>(words[0]) << 32 | words[1]) >> 11;
  return static_cast<double>(mantissa) * 0x1p-53;
}

// top-k, min-p, top-p and the draw, over `count` > 0 candidates in order. They are the first of all candidates, and at
// least one more than top-k and min-p keep, unless there are no more.
TESSERA_HOST_DEVICE constexpr int32_t draw_candidate(const Candidate* candidates, int64_t count,
                                                     const SamplingParams& params, uint64_t position) {
  if (params.top_k > 0 && params.top_k < count) count = params.top_k;
  int64_t kept = 1;  // the first always stays
  while (kept < count && candidates[kept].probability >= static_cast<double>(params.min_p)) ++kept;
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) total += candidates[i].probability;
  if (params.top_p < 1) {
    double running = 0;
    int64_t nucleus = 0;
    while (nucleus < kept && running < static_cast<double>(params.top_p) * total) {
      running += candidates[nucleus++].probability;
    }
    kept = nucleus > 1 ? nucleus : 1;
    total = kept == 1 ? candidates[0].probability : running;
  }
  const double target = unit_draw(params, position) * total;
  double running = 0;
  int64_t chosen = 0;
  for (; chosen + 1 < kept; ++chosen) {
    running += candidates[chosen].probability;
    if (target < running) break;
  }
  return candidates[chosen].id;
}

// The number of candidates before the one at which their running sum, in order, reaches a bound (is_above: exceeds it)
// of which only an interval is known; -1 where that or `count` doesn't tell.
TESSERA_HOST_DEVICE constexpr int64_t reach(const Candidate* candidates, int64_t count, double low, double high,
                                            bool is_above) {
  double running = 0;
  for (int64_t i = 0; i <= count; ++i) {
    if (is_above ? running > high : running >= high) return i;
    if (is_above ? running > low : running >= low) return -1;
    if (i < count) running += candidates[i].probability;
  }
  return -1;
}

// The draw without a sort of everything: `candidates` as above, or, where neither top-k nor min-p is asked for, the
// first of all candidates, whose sum, made in any order, lies in [low, high]. -1 where they don't tell: the draw is
// then draw_candidate's, over all.
TESSERA_HOST_DEVICE constexpr int32_t draw_of_first(const Candidate* candidates, int64_t count, double low, double high,
                                                    SamplingParams params, uint64_t position) {
  if (params.top_k > 0 || params.min_p > 0) return draw_candidate(candidates, count, params, position);
  const bool is_nucleus = params.top_p < 1;
  const double share = is_nucleus ? static_cast<double>(params.top_p) : unit_draw(params, position);
  const int64_t reached = reach(candidates, count, share * low, share * high, !is_nucleus);
  if (!is_nucleus) return reached > 0 ? candidates[reached - 1].id : -1;
  if (reached < 0) return -1;
  params.top_p = 1;  // the nucleus is known, and with it the sum that is drawn from
  return draw_candidate(candidates, reached > 1 ? reached : 1, params, position);
}

}  // namespace tessera::ops
