// SPDX-License-Identifier: Apache-2.0
#include "ops/sample/sample.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/rng.h"
#include "ops/sample/sample_steps.h"

namespace tessera::ops {

namespace {

// Index of the largest logit, ties to the lower id; NaN never wins.
int32_t largest(const Sample::Desc& desc, const float* logits) {
  int32_t best = -1;
  for (int32_t id = 0; id < desc.vocab; ++id) {
    if (std::isnan(logits[id]) || logits[id] == -std::numeric_limits<float>::infinity()) continue;
    if (best < 0 || logits[id] > logits[best]) best = id;
  }
  TESSERA_CHECK(best >= 0, "every logit is NaN or minus infinity");
  return best;
}

}  // namespace

std::string Sample::Desc::to_string() const {
  return fmt::format("[{}]", vocab);
}

void apply_bias_and_penalties(const Sample::Desc& desc, const Sample::Args& args) {
  for (int64_t i = 0; i < args.num_bias; ++i) args.logits[args.bias_ids[i]] += args.bias_values[i];
  if (args.counts == nullptr) return;
  const SamplingParams& params = args.params;
  for (int64_t id = 0; id < desc.vocab; ++id) {
    const int32_t count = args.counts[id];
    if (count == 0) continue;
    float& logit = args.logits[id];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    logit -= params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
  }
}

double relative_probability(float logit, float top, float temperature) {
  const double p = std::exp((static_cast<double>(logit) - static_cast<double>(top)) / static_cast<double>(temperature));
  return p > 0 ? p : 0;  // drops NaN
}

double unit_draw(const SamplingParams& params, uint64_t position) {
  const auto bits = philox(params.seed, position);
  const uint64_t mantissa = (static_cast<uint64_t>(bits[0]) << 32 | bits[1]) >> 11;  // 53 bits
  return static_cast<double>(mantissa) * 0x1p-53;
}

int32_t draw_candidate(const Candidate* candidates, int64_t count, const SamplingParams& params, uint64_t position) {
  if (params.top_k > 0) count = std::min<int64_t>(count, params.top_k);
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
    kept = std::max<int64_t>(1, nucleus);
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

int64_t sample_reference_workspace(const Sample::Desc& desc, int64_t) {
  return desc.vocab * static_cast<int64_t>(sizeof(Candidate));
}

void sample_reference(const Sample::Desc& desc, const Sample::Args& args, device::Queue&) {
  apply_bias_and_penalties(desc, args);
  const int32_t top = largest(desc, args.logits);
  if (args.params.temperature == 0) {
    *args.token = top;
    return;
  }
  Candidate* candidates = static_cast<Candidate*>(args.workspace);
  int64_t count = 0;
  for (int32_t id = 0; id < desc.vocab; ++id) {
    const double p = id == top ? 1 : relative_probability(args.logits[id], args.logits[top], args.params.temperature);
    if (p > 0) candidates[count++] = {p, id};
  }
  std::sort(candidates, candidates + count, comes_before);
  *args.token = draw_candidate(candidates, count, args.params, args.position);
}

}  // namespace tessera::ops
