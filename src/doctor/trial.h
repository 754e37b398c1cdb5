// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tries hypotheses: repairs the suspected weights in memory, runs the sample again from the first repaired layer, and
// compares how well each token was predicted.
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

class Trials {
 public:
  // `inputs[n]` are the streams before layer n of the unrepaired run in `stack`. `checkpoint` and `config` as the
  // stack's. Everything must outlive this.
  Trials(const checkpoint::Checkpoint& checkpoint, const model::Config& config, LayerStack& stack,
         const std::vector<device::Tensor>& inputs, std::vector<int32_t> ids);

  // Surprises with the plan's repairs made. Layers without a repair run as they are.
  std::vector<double> run(const RepairPlan& plan);

 private:
  const model::Config& config_;
  LayerStack& stack_;
  const std::vector<device::Tensor>& inputs_;
  std::vector<int32_t> ids_;
  model::WeightSource plain_, edited_;
};

}  // namespace tessera::doctor
