// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tries hypotheses: repairs the suspected weights in memory, runs the sample again from the first repaired layer, and
// compares how well each token was predicted.
#include <span>
#include <vector>

#include "doctor/layer_stack.h"
#include "doctor/repair.h"

namespace tessera::doctor {

struct Comparison {
  double before = 0, after = 0;  // mean surprise a token, nats
  double gain = 0;               // before - after
  double error = 0;              // standard error of the gain, from the tokens' own differences
  bool is_better() const { return gain > 0.01 && gain > 2.5 * error; }
  bool is_worse() const { return gain < -0.01 && -gain > 2.5 * error; }
};
// Two runs over the same tokens; a run that is not finite is infinitely bad.
Comparison compare(const std::vector<double>& before, const std::vector<double>& after);
double mean(const std::vector<double>& values);

// The sample under one set of weights.
struct Score {
  std::vector<double> surprises;  // nats, of every token but the first
  // What the model itself expects them to cost a token, and the standard error of that expectation.
  double expected = 0, error = 0;
  double mean() const { return doctor::mean(surprises); }
  // By how many standard errors it costs more than the model expects. A sound model is about right about itself
  // (a text that it knows by heart costs less than it expects); a damaged one is surer than it is right.
  double excess() const { return (mean() - expected) / (error + 1e-9); }
};
Score score(std::span<const float> logits, std::span<const int32_t> ids, int64_t vocab);

class Trials {
 public:
  // `inputs[n]` are the streams before layer n of the unrepaired run in `stack`, `output` those after the last.
  // `checkpoint` and `config` as the
  // stack's. Everything must outlive this.
  Trials(const checkpoint::Checkpoint& checkpoint, const model::Config& config, LayerStack& stack,
         const std::vector<device::Tensor>& inputs, const device::Tensor& output, std::vector<int32_t> ids);

  // The sample with the plan's repairs made. Layers without a repair run as they are. `num_tokens`: the first tokens
  // alone (what follows them has no part in them); 0 for all.
  Score run(const RepairPlan& plan, int64_t num_tokens = 0);

 private:
  const model::Config& config_;
  LayerStack& stack_;
  const std::vector<device::Tensor>& inputs_;
  const device::Tensor& output_;
  std::vector<int32_t> ids_;
  model::WeightSource plain_, edited_;
};

}  // namespace tessera::doctor
