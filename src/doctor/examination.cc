// SPDX-License-Identifier: Apache-2.0
#include "doctor/examination.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "base/error.h"
#include "doctor/config_facts.h"
#include "ops/reference_rows.h"

namespace tessera::doctor {

namespace {

// The sample is poorly predicted where it costs this share of guessing, or more than the model itself expects by that
// many standard errors and that factor. Sound models measure an excess below 0 on a text that they know, damaged ones 3
// to 600.
constexpr double kNearGuessing = 0.6, kExcess = 6, kExcessRatio = 1.25;
constexpr double kSomeExcess = 2.5, kSomeExcessRatio = 1.1;
constexpr size_t kMaxSingleTrials = 4;
constexpr int64_t kLoadedShare = 2;  // keep layers where all weights take at most half of the memory

device::Tensor copy_as(const device::Tensor& source, DType dtype) {
  const int64_t count = source.view().shape.num_elements();
  std::vector<float> values(static_cast<size_t>(count));
  ops::load_floats(source, 0, count, values.data());
  device::Tensor out(dtype, source.view().shape);
  ops::store_floats(out, 0, count, values.data());
  return out;
}

double rms(const device::Tensor& tensor) {
  const int64_t count = tensor.view().shape.num_elements();
  std::vector<float> values(static_cast<size_t>(count));
  ops::load_floats(tensor, 0, count, values.data());
  double square = 0;
  for (const float x : values) square += static_cast<double>(x) * x;
  return std::sqrt(square / static_cast<double>(count));
}

std::string text_of(const Comparison& comparison) {
  return fmt::format("repaired in memory, the sample costs {:.3f} instead of {:.3f} nats a token", comparison.after,
                     comparison.before);
}

}  // namespace

Examination::Examination(const checkpoint::Checkpoint& checkpoint, const model::Config& config,
                         std::span<const ops::Backend* const> backends, const device::Machine& machine,
                         const DeepOptions& options, std::vector<int32_t> ids)
    : checkpoint_(checkpoint),
      config_(config),
      backends_(backends),
      machine_(machine),
      options_(options),
      ids_(std::move(ids)),
      executor_(device::make_executor(machine, options.num_threads)),
      weights_(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound) {}

StackOptions Examination::stack_options(const ops::Precision& precision) const {
  return {precision, weights_.total_bytes() * kLoadedShare < machine_.free_bytes()};
}

void Examination::record_layer(int64_t layer, const OpRecorder& exact, const device::Tensor& streams,
                               DeepReport& report) const {
  LayerReport line{layer, rms(streams), {}, 0, 0, 0};
  std::map<int32_t, int64_t> hits;
  for (const int32_t id : exact.expert_ids()) ++hits[id];
  line.experts_hit = static_cast<int64_t>(hits.size());
  int64_t most = 0;
  for (const auto& [id, count] : hits) most = std::max(most, count);
  if (!exact.expert_ids().empty()) {
    line.busiest_share = static_cast<double>(most) / static_cast<double>(exact.expert_ids().size());
  }
  // Each of k slots of a token goes to another expert, so one expert can have at most 1 / k of all.
  const bool has_collapsed = ids_.size() >= 32 && static_cast<int64_t>(hits.size()) <= config_.experts_per_token + 1 &&
                             config_.num_experts >= 4 * config_.experts_per_token && !config_.is_hashed(layer);
  if (has_collapsed) {
    report.findings.push_back(
        {Severity::kWarning, "router-collapsed", fmt::format("layers.{}.ffn.gate", layer),
         fmt::format("{} tokens reach only {} of {} experts", ids_.size(), hits.size(), config_.num_experts),
         "compare gate.weight and gate.bias with the original"});
  }
  report.layers.push_back(std::move(line));
}

void Examination::run(DeepReport& report, ProgressSink* progress) {
  const ops::Precision exact{ops::InputMode::kF32, ops::CacheMode::kExact};
  stack_ = std::make_unique<LayerStack>(weights_, backends_, machine_, *executor_, stack_options(exact), ids_);
  const bool has_mode = !(options_.mode == exact);
  StackOptions mode_options = stack_options(options_.mode);
  mode_options.keeps_layers = true;  // for the two runs of a layer
  LayerStack mode_stack(weights_, backends_, machine_, *executor_, mode_options, ids_);
  device::Tensor streams = stack_->embed(), mode_streams = has_mode ? mode_stack.embed() : device::Tensor();
  OpRecorder exact_ops, mode_ops;
  std::string first_bad, first_bad_mode;
  if (progress != nullptr) progress->begin("run the sample", stack_->num_layers(), "layers");
  for (size_t layer = 0; layer < stack_->num_layers(); ++layer) {
    inputs_.push_back(copy_as(streams, DType::kF32));
    exact_ops.clear();
    stack_->run_layer(layer, streams, &exact_ops);
    if (first_bad.empty() && exact_ops.first_bad()) first_bad = *exact_ops.first_bad();
    record_layer(static_cast<int64_t>(layer), exact_ops, streams, report);
    if (has_mode) {
      // On the exact run's input, so that an error belongs to the op that makes it.
      const device::Tensor forced = copy_as(inputs_.back(), mode_stack.activation());
      mode_ops.clear();
      mode_stack.run_layer(layer, forced, &mode_ops);
      std::vector<OpError> errors = compare_outputs(mode_ops, exact_ops);
      std::stable_sort(errors.begin(), errors.end(),
                       [](const OpError& a, const OpError& b) { return a.relative > b.relative; });
      // An op that runs in parts is traced in parts: its worst is enough.
      std::set<std::string> seen;
      std::erase_if(errors, [&](const OpError& error) { return !seen.insert(error.name).second; });
      if (errors.size() > 3) errors.resize(3);
      report.layers.back().worst = std::move(errors);
      report.layers.back().rerouted = num_rerouted(mode_ops, exact_ops, config_.experts_per_token);
      mode_ops.clear();
      mode_stack.run_layer(layer, mode_streams, &mode_ops);
      if (first_bad_mode.empty() && mode_ops.first_bad()) first_bad_mode = *mode_ops.first_bad();
      mode_stack.drop_layer(layer);
    }
    if (progress != nullptr) progress->advance(1);
  }
  if (progress != nullptr) progress->end();
  score_ = score(stack_->logits(streams), ids_, config_.vocab_size);
  output_ = std::move(streams);
  report.surprise = score_.mean();
  report.expected = score_.expected, report.excess = score_.excess();
  if (has_mode) {
    report.mode_surprise = mean(surprises(mode_stack.logits(mode_streams), ids_, config_.vocab_size));
  }
  for (const auto& [bad, mode] : {std::pair{first_bad, std::string("f32 x exact")}, {first_bad_mode, report.mode}}) {
    if (bad.empty()) continue;
    report.findings.push_back({Severity::kFault, "not-finite", bad.substr(0, bad.find(':')),
                               fmt::format("first value that is not finite, in mode {}: {}", mode, bad),
                               mode == report.mode && first_bad.empty()
                                   ? "the weights are sound in f32: choose a mode with more range, such as a16"
                                   : "the weights that feed this op are too large: see the other findings"});
  }
  if (report.mode_surprise && report.can_judge_text &&
      !(*report.mode_surprise < *report.surprise + std::max(0.1, 0.1 * *report.surprise)) && !is_poor(score_)) {
    report.findings.push_back({Severity::kWarning, "precision", report.mode,
                               fmt::format("this mode costs {:.3f} nats a token, f32 x exact {:.3f}",
                                           *report.mode_surprise, *report.surprise),
                               "use a mode with more precision, or see which op of which layer loses it"});
  }
  trials_ = std::make_unique<Trials>(checkpoint_, config_, *stack_, inputs_, output_, ids_);
}

bool Examination::is_poor(const Score& score) const {
  return is_near_guessing(score) || (score.excess() > kExcess && score.mean() > kExcessRatio * score.expected);
}

bool Examination::costs_too_much(const Score& score) const {
  return is_near_guessing(score) || (score.excess() > kSomeExcess && score.mean() > kSomeExcessRatio * score.expected);
}

bool Examination::is_near_guessing(const Score& score) const {
  return !(score.mean() < kNearGuessing * std::log(static_cast<double>(config_.vocab_size)));
}

// Runs the accepted plan with `added` behind it; keeps it where it helps. False where it hurts.
bool Examination::try_plan(const RepairPlan& added, Comparison& comparison) {
  RepairPlan plan = plan_;
  for (const auto& [tensor, repairs] : added.by_tensor()) {
    for (const Repair& repair : repairs) plan.add(repair);
  }
  Score after = trials_->run(plan);
  comparison = compare(score_.surprises, after.surprises);
  if (comparison.is_worse()) return false;
  if (comparison.is_better()) {
    plan_ = std::move(plan);
    score_ = std::move(after);
  }
  return true;
}

// Makes the repairs of all of them at once; what the sample does not confirm is a note.
void Examination::try_doubtful(const std::vector<Suspect*>& suspects, bool can_try) {
  RepairPlan plan;
  for (const Suspect* suspect : suspects) {
    for (const Repair& repair : suspect->repairs) plan.add(repair);
  }
  Comparison comparison;
  const bool is_proved = can_try && !plan.empty() && try_plan(plan, comparison) && comparison.is_better();
  for (Suspect* suspect : suspects) {
    if (is_proved) {
      suspect->finding.evidence += "; " + text_of(comparison);
      continue;
    }
    suspect->finding.severity = suspect->if_unproved;
    suspect->finding.evidence +=
        can_try ? "; the sample gives no evidence that this is wrong" : "; cannot judge by the sample";
  }
}

void Examination::try_suspects(std::vector<Suspect> suspects, DeepReport& report) {
  const bool can_try = report.can_judge_text && report.can_judge_weights;
  // Two tests may see one fault; the surer one comes first.
  std::stable_sort(suspects.begin(), suspects.end(),
                   [](const Suspect& a, const Suspect& b) { return a.needs_trial < b.needs_trial; });
  std::set<std::string> seen;
  std::erase_if(suspects,
                [&](const Suspect& s) { return !seen.insert(s.finding.kind + " " + s.finding.where).second; });
  std::map<std::string, RepairPlan> by_kind;
  std::map<std::string, std::set<std::string>> repaired;
  for (const Suspect& suspect : suspects) {
    if (suspect.needs_trial || !can_try) continue;
    for (const Repair& repair : suspect.repairs) {
      if (repaired[suspect.finding.kind].insert(repair.tensor).second) by_kind[suspect.finding.kind].add(repair);
    }
  }
  std::map<std::string, std::pair<bool, Comparison>> outcome;
  for (const auto& [kind, plan] : by_kind) {
    Comparison comparison;
    const bool is_kept = try_plan(plan, comparison);
    outcome[kind] = {is_kept, comparison};
  }
  // Doubtful suspects of a kind: one by one where they are few, all at once where they are many or belong to a fault
  // that is sure.
  std::map<std::string, std::vector<Suspect*>> doubtful;
  for (Suspect& suspect : suspects) {
    if (suspect.needs_trial) doubtful[suspect.finding.kind].push_back(&suspect);
  }
  for (const auto& [kind, members] : doubtful) {
    const bool are_many = members.size() > kMaxSingleTrials || outcome.contains(kind);
    const size_t step = are_many ? members.size() : 1;
    for (size_t begin = 0; begin < members.size(); begin += step) {
      try_doubtful(
          {members.begin() + static_cast<int64_t>(begin), members.begin() + static_cast<int64_t>(begin + step)},
          can_try);
    }
  }
  for (Suspect& suspect : suspects) {
    Finding& finding = suspect.finding;
    const auto at = outcome.find(finding.kind);
    if (!suspect.needs_trial && at != outcome.end() && !suspect.repairs.empty()) {
      const auto& [is_kept, comparison] = at->second;
      if (!is_kept) finding.severity = Severity::kWarning;
      finding.evidence += "; ";
      finding.evidence += comparison.is_better() ? "all of this kind " + text_of(comparison)
                          : is_kept              ? "repairing it changes nothing on this sample"
                                                 : "but " + text_of(comparison) + ": perhaps it is meant to be so";
    }
    report.findings.push_back(std::move(finding));
  }
  if (!plan_.empty()) report.repaired = score_.mean();
}

Score Examination::score_with(const model::Config& config) {
  model::WeightSource source(checkpoint_, config, 0, model::Shard{}, nullptr, model::Inexact::kRound);
  model::WeightSource plain(checkpoint_, config, 0, model::Shard{}, nullptr, model::Inexact::kRound);
  const RepairEdit edit(plan_, plain);
  source.set_edit(&edit);
  StackOptions options = stack_options({ops::InputMode::kF32, ops::CacheMode::kExact});
  options.keeps_layers = false;
  LayerStack stack(source, backends_, machine_, *executor_, options, ids_);
  const device::Tensor streams = stack.embed();
  for (size_t layer = 0; layer < stack.num_layers(); ++layer) stack.run_layer(layer, streams, nullptr);
  return score(stack.logits(streams), ids_, config.vocab_size);
}

void Examination::try_config(DeepReport& report) {
  if (!report.can_judge_text || !report.can_judge_weights) return;
  for (const ConfigHypothesis& hypothesis : config_hypotheses(config_)) {
    const std::string where = "config.json: " + hypothesis.field;
    std::string best, all;
    Comparison most;
    for (const auto& [text, config] : hypothesis.usual) {
      const Comparison comparison = compare(score_.surprises, score_with(config).surprises);
      all += (all.empty() ? "" : " or ") + text;
      if ((hypothesis.is_size ? is_convincing(comparison) : comparison.is_better()) && comparison.gain > most.gain) {
        best = text, most = comparison;
      }
    }
    if (!best.empty()) {
      report.findings.push_back(
          {Severity::kFault, "config", where,
           fmt::format("it says {}, releases have {}; with {} the sample costs {:.3f} instead of {:.3f} nats a token",
                       hypothesis.found, all, best, most.after, most.before),
           fmt::format("set {} to {}, or to what the release of these weights says", hypothesis.field, best)});
      report.repaired = std::min(report.repaired.value_or(most.after), most.after);
    } else if (!hypothesis.is_size) {
      report.findings.push_back(
          {Severity::kNote, "config", where,
           fmt::format("it says {}, releases have {}; the sample is not better with that", hypothesis.found, all), ""});
    }
  }
}

}  // namespace tessera::doctor
