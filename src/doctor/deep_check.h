// SPDX-License-Identifier: Apache-2.0
#pragma once
// The whole examination: weights by themselves, a run of sample tokens layer by layer, and hypotheses tried on it.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "doctor/finding.h"
#include "doctor/op_recorder.h"
#include "ops/backend.h"
#include "ops/precision.h"

namespace tessera::doctor {

struct DeepOptions {
  ops::Precision mode;  // compared with f32 x exact, layer by layer on the same inputs
  int num_threads = 0;
  std::string sample_text;          // empty: builtin_sample(); tokenised as it is, special tokens included
  std::vector<int32_t> sample_ids;  // in place of text
  int64_t max_tokens = 160;         // of the sample; the rest is left out
};

struct LayerReport {
  int64_t layer = 0;
  double stream_rms = 0;       // after the layer
  std::vector<OpError> worst;  // of the chosen mode, largest first, at most three
  int64_t rerouted = 0;        // tokens that the chosen mode sends to other experts, on the same input
  int64_t experts_hit = 0;     // of num_experts, on the sample
  double busiest_share = 0;    // of the routed slots, taken by one expert
};

struct DeepReport {
  std::vector<Finding> findings;
  std::vector<LayerReport> layers;
  std::string mode;
  size_t num_tokens = 0;
  int64_t num_experts = 0;
  std::optional<double> surprise;       // nats a token in f32 x exact
  std::optional<double> expected;       // nats a token that the model itself expects, by its own probabilities
  double excess = 0;                    // surprise above that, in standard errors of the expectation
  std::optional<double> mode_surprise;  // in the chosen mode
  std::optional<double> repaired;       // in f32 x exact with every accepted repair made in memory
  double uniform = 0;                   // ln(vocabulary)
  bool can_judge_weights = false;       // kinship stands out of the noise: the weights are trained
  bool can_judge_text = false;          // there is a tokenizer (or ids were given)
  // Mistakes that leave no trace in the weights (a scale, a sign, a shifted table): how many were tried on the sample,
  // of how many that there are to try.
  int64_t num_tried = 0, num_to_try = 0;
  std::string verdict;  // one to a few sentences
};

// Throws only for what makes an examination impossible (no such folder, no memory); what is wrong with the checkpoint
// is findings. Sinks may be null.
DeepReport check_deep(const std::string& directory, const DeepOptions& options,
                      std::span<const ops::Backend* const> backends, const device::Machine& machine,
                      ProgressSink* progress);

}  // namespace tessera::doctor
