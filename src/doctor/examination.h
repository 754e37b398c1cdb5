// SPDX-License-Identifier: Apache-2.0
#pragma once
// The run of the sample, and the trials that follow it.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "doctor/deep_check.h"
#include "doctor/survey.h"
#include "doctor/suspect.h"
#include "doctor/trial.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::doctor {

// A mistake to try: what would be said of it if its repairs make the sample much likelier.
struct Hypothesis {
  Finding finding;  // its evidence is completed by what the sample says
  std::vector<Repair> repairs;
};

class Examination {
 public:
  // Everything given must outlive it. `ids`: the sample, all below the vocabulary's size.
  Examination(const checkpoint::Checkpoint& checkpoint, const model::Config& config,
              std::span<const ops::Backend* const> backends, const device::Machine& machine, const DeepOptions& options,
              std::vector<int32_t> ids);

  // Runs the sample in f32 x exact and in the chosen mode, layer by layer; fills layers and surprises.
  void run(DeepReport& report, ProgressSink* progress);
  // How far each matrix's size lies from its siblings' (log2), from the survey: names the likelier of two matrices
  // whose repair does the same.
  void set_deviations(const std::vector<MatrixFacts>& matrices);
  // Makes the suspects' repairs in memory, kind by kind, and turns each suspect into a finding by what the sample says.
  void try_suspects(std::vector<Suspect> suspects, DeepReport& report);
  // Tries the usual values of unusual settings.
  void try_config(DeepReport& report);
  // Tries mistakes that leave no trace in the weights, whatever the sample costs: a factor or a sign of each matrix
  // that can hurt, tables that are shifted (scan.cc).
  void scan(DeepReport& report, ProgressSink* progress);
  // Where the sample is poorly predicted and nothing explains it: names the tokenizer where the model is sound in its
  // own ids and text does not survive the way through it, else tries wider mistakes (hidden_faults.cc).
  void explain_surprise(const text::Tokenizer* tokenizer, DeepReport& report, ProgressSink* progress);

 private:
  StackOptions stack_options(const ops::Precision& precision) const;
  void record_layer(int64_t layer, const OpRecorder& exact, const device::Tensor& streams, DeepReport& report) const;
  void try_doubtful(const std::vector<Suspect*>& suspects, bool can_try);
  bool try_plan(const RepairPlan& added, Comparison& comparison);
  // A try among many, of which one may help by chance: it must help a great deal, and lead away from guessing.
  bool is_convincing(const Comparison& comparison) const;
  Score score_with(const model::Config& config);
  enum class Stop { kNever, kWhenExplained };
  void try_hypotheses(std::vector<Hypothesis> hypotheses, Stop stop, DeepReport& report, ProgressSink* progress);
  bool is_poor(const Score& score) const;
  bool costs_too_much(const Score& score) const;  // worth a warning, poor or not
  std::vector<Hypothesis> scan_hypotheses() const;
  std::vector<Hypothesis> wide_hypotheses() const;
  void add_fp8_shifts(std::vector<Hypothesis>& out) const;
  void add_layer_exchanges(std::vector<Hypothesis>& out) const;
  std::vector<int32_t> own_text(bool& is_confident) const;
  Score score_shifted(const text::Tokenizer& tokenizer, int64_t shift);
  bool has_foreign_merges(const text::Tokenizer& tokenizer, DeepReport& report) const;
  bool has_moved_ids(const text::Tokenizer& tokenizer, DeepReport& report);
  bool is_near_guessing(const Score& score) const;

  const checkpoint::Checkpoint& checkpoint_;
  const model::Config& config_;
  std::span<const ops::Backend* const> backends_;
  const device::Machine& machine_;
  const DeepOptions& options_;
  std::vector<int32_t> ids_;
  std::unique_ptr<device::Executor> executor_;
  model::WeightSource weights_;
  std::unique_ptr<LayerStack> stack_;
  std::vector<device::Tensor> inputs_;  // streams before each layer, f32 x exact
  std::unique_ptr<Trials> trials_;
  device::Tensor output_;     // and after the last
  Score score_;               // of the unrepaired run, then of the best plan so far
  RepairPlan plan_;           // every repair accepted so far
  uint64_t bytes_tried_ = 0;  // weights run through in trials
  std::map<std::string, double> deviations_;
};

}  // namespace tessera::doctor
