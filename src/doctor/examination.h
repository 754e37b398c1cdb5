// SPDX-License-Identifier: Apache-2.0
#pragma once
// The run of the sample, and the trials that follow it.
#include <memory>
#include <vector>

#include "doctor/deep_check.h"
#include "doctor/suspect.h"
#include "doctor/trial.h"

namespace tessera::doctor {

class Examination {
 public:
  // Everything given must outlive it. `ids`: the sample, all below the vocabulary's size.
  Examination(const checkpoint::Checkpoint& checkpoint, const model::Config& config,
              std::span<const ops::Backend* const> backends, const device::Machine& machine, const DeepOptions& options,
              std::vector<int32_t> ids);

  // Runs the sample in f32 x exact and in the chosen mode, layer by layer; fills layers and surprises.
  void run(DeepReport& report, ProgressSink* progress);
  // Makes the suspects' repairs in memory, kind by kind, and turns each suspect into a finding by what the sample says.
  void try_suspects(std::vector<Suspect> suspects, DeepReport& report);
  // Tries the usual values of unusual settings.
  void try_config(DeepReport& report);
  // Where the sample is poorly predicted and nothing explains it: tries mistakes that leave no trace in the weights,
  // and names the tokenizer where the model is sound in its own ids.
  void explain_surprise(DeepReport& report);

 private:
  StackOptions stack_options(const ops::Precision& precision) const;
  void record_layer(int64_t layer, const OpRecorder& exact, const device::Tensor& streams, DeepReport& report) const;
  void try_doubtful(const std::vector<Suspect*>& suspects, bool can_try);
  bool try_plan(const RepairPlan& added, Comparison& comparison);
  void try_hidden_repairs(DeepReport& report);
  std::vector<std::vector<Repair>> hidden_repairs(std::vector<std::string>& labels) const;
  bool predicts_itself() const;
  bool is_poor(const DeepReport& report) const;

  const checkpoint::Checkpoint& checkpoint_;
  const model::Config& config_;
  std::span<const ops::Backend* const> backends_;
  const device::Machine& machine_;
  const DeepOptions& options_;
  std::vector<int32_t> ids_;
  model::WeightSource weights_;
  std::unique_ptr<LayerStack> stack_;
  std::vector<device::Tensor> inputs_;  // streams before each layer, f32 x exact
  std::unique_ptr<Trials> trials_;
  std::vector<double> surprises_;  // of the unrepaired run, then of the best plan so far
  RepairPlan plan_;                // every repair accepted so far
};

}  // namespace tessera::doctor
