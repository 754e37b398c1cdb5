// SPDX-License-Identifier: Apache-2.0
#include "ops/sample/sample.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/sample/sample_steps.h"

namespace tessera::ops {

namespace {

// Index of the largest allowed logit, ties to the lower id; NaN and minus infinity never win. -1: there is no other.
int32_t largest(const Sample::Desc& desc, const float* logits, const uint32_t* mask) {
  int32_t best = -1;
  for (int32_t id = 0; id < desc.vocab; ++id) {
    if (!is_allowed(mask, id) || std::isnan(logits[id]) || logits[id] == -std::numeric_limits<float>::infinity())
      continue;
    if (best < 0 || logits[id] > logits[best]) best = id;
  }
  return best;
}

int32_t draw(const Sample::Desc& desc, const float* logits, const uint32_t* mask, const SampleRow& row,
             Candidate* candidates) {
  const int32_t top = largest(desc, logits, mask);
  if (top < 0 || row.params.temperature == 0) return top;
  int64_t count = 0;
  for (int32_t id = 0; id < desc.vocab; ++id) {
    if (!is_allowed(mask, id)) continue;
    const double p = id == top ? 1 : relative_probability(logits[id], logits[top], row.params.temperature);
    if (p > 0) candidates[count++] = {p, id};
  }
  std::sort(candidates, candidates + count, comes_before);
  return draw_candidate(candidates, count, row.params, row.position);
}

}  // namespace

std::string Sample::Desc::to_string() const {
  return fmt::format("[{}]", vocab);
}

void apply_bias_and_penalties(const Sample::Desc& desc, const Sample::Args& args) {
  if (args.num_rows != 1) return;
  float* logits = args.logits + args.rows[0].logit_row * desc.vocab;
  for (int64_t i = 0; i < args.num_bias; ++i) logits[args.bias_ids[i]] += args.bias_values[i];
  for (int64_t id = 0; args.counts != nullptr && id < desc.vocab; ++id) {
    if (args.counts[id] != 0) logits[id] = penalised(logits[id], args.rows[0].params, args.counts[id]);
  }
}

double relative_probability(float logit, float top, float temperature) {
  const double p = std::exp((static_cast<double>(logit) - static_cast<double>(top)) / static_cast<double>(temperature));
  return p > 0 ? p : 0;  // drops NaN
}

int64_t sample_reference_workspace(const Sample::Desc& desc, int64_t) {
  return desc.vocab * static_cast<int64_t>(sizeof(Candidate));
}

void sample_reference(const Sample::Desc& desc, const Sample::Args& args, device::Queue&) {
  apply_bias_and_penalties(desc, args);
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const SampleRow& row = args.rows[i];
    args.tokens[i] = draw(desc, args.logits + row.logit_row * desc.vocab, mask_of(args.masks, row, desc.vocab), row,
                          static_cast<Candidate*>(args.workspace));
  }
}

}  // namespace tessera::ops
