// SPDX-License-Identifier: Apache-2.0
// Mistakes that leave no trace in the weights themselves: tried on the sample, the widest first.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "doctor/examination.h"
#include "model/load_model.h"

namespace tessera::doctor {

namespace {

constexpr double kNoise = 0.6;  // share of ln(vocabulary)
constexpr int64_t kOwnTokens = 24, kLeastDistinct = 8;
constexpr double kOwnSurprise = 0.2;  // share of ln(vocabulary) that a sound model's own likeliest text may cost

void add_exchange(std::vector<Repair>& repairs, const std::string& a, const std::string& b) {
  repairs.push_back({.kind = RepairKind::kReadFrom, .tensor = a, .other = b});
  repairs.push_back({.kind = RepairKind::kReadFrom, .tensor = b, .other = a});
}

}  // namespace

// Each entry of the result is one hypothesis; labels[i] is the place it is about.
std::vector<std::vector<Repair>> Examination::hidden_repairs(std::vector<std::string>& labels) const {
  std::vector<std::vector<Repair>> out;
  const auto shared = [](int64_t layer, const char* matrix) {
    return fmt::format("layers.{}.ffn.shared_experts.{}", layer, matrix);
  };
  std::vector<Repair> all;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    add_exchange(all, shared(layer, "w1"), shared(layer, "w3"));
  }
  out.push_back(all);
  labels.push_back("layers.*.ffn.shared_experts.w1");
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    std::vector<Repair> one;
    add_exchange(one, shared(layer, "w1"), shared(layer, "w3"));
    out.push_back(std::move(one));
    labels.push_back(shared(layer, "w1"));
  }
  // FP8 block scales that moved by one block, matrix by matrix, and all together.
  for (const int64_t shift : {1, -1}) {
    std::vector<Repair> every;
    for (const model::WeightRow& row : model::make_weight_spec(config_, 0)) {
      if (row.kind != model::WeightKind::kLinear || row.expert >= 0) continue;
      if (weights_.format(row.name) != ops::WeightFormat::kFp8Block) continue;
      const Shape shape = weights_.local_shape(row.name);
      if (shape[0] <= 128 && shape[1] <= 128) continue;
      every.push_back({.kind = RepairKind::kShiftFp8Scales, .tensor = row.name, .shift = shift});
    }
    if (every.empty()) continue;
    out.push_back(every);
    labels.push_back("layers.*.attn");
    for (const Repair& repair : every) {
      out.push_back({repair});
      labels.push_back(repair.tensor);
    }
  }
  return out;
}

void Examination::try_hidden_repairs(DeepReport& report) {
  std::vector<std::string> labels;
  const std::vector<std::vector<Repair>> hypotheses = hidden_repairs(labels);
  for (size_t i = 0; i < hypotheses.size() && is_poor(report); ++i) {
    RepairPlan plan;
    for (const Repair& repair : hypotheses[i]) plan.add(repair);
    Comparison comparison;
    // One of many tries: it must help a great deal to be believed.
    const bool is_kept = try_plan(plan, comparison);
    if (!is_kept || !comparison.is_better() || comparison.gain < 0.05 * comparison.before) continue;
    const bool is_exchange = hypotheses[i].front().kind == RepairKind::kReadFrom;
    report.findings.push_back(
        {Severity::kFault, is_exchange ? "gate-up-swapped" : "scale-order", labels[i],
         fmt::format("{}: undone in memory, the sample costs {:.3f} instead of {:.3f} nats a token",
                     is_exchange ? "w1 (gate) and w3 (up) are exchanged"
                                 : fmt::format("its FP8 block scales lie one block too {}",
                                               hypotheses[i].front().shift > 0 ? "late" : "early"),
                     comparison.after, comparison.before),
         is_exchange ? "exchange w1 and w3, or convert again from the original"
                     : "convert again: scale [i, j] belongs to rows 128 i and columns 128 j onward"});
  }
  if (!plan_.empty()) report.repaired = mean(surprises_);
}

// Whether the model, begun with its begin token, goes on confidently and without falling into a loop: what a sound
// model does in its own ids, whatever the tokenizer makes of text.
bool Examination::predicts_itself() const {
  model::LoadOptions options;
  options.precision = {ops::InputMode::kA16, ops::CacheMode::kFp8};
  options.num_threads = options_.num_threads;
  options.max_step_tokens = 1;
  options.sequence_tokens = kOwnTokens + 1;
  options.with_draft = false;
  options.allow_inexact = true;
  try {
    const model::LoadedModel loaded =
        model::load_model(checkpoint_.directory(), options, backends_, machine_, nullptr, nullptr);
    const auto state = loaded.runner->new_sequence(kOwnTokens + 1);
    std::set<int32_t> distinct;
    double cost = 0;
    int32_t id = static_cast<int32_t>(config_.bos_id);
    for (int64_t t = 0; t < kOwnTokens; ++t) {
      const model::SequenceSlice slice{state.get(), {&id, 1}, model::LogitRows::kLast};
      const TensorView row = loaded.runner->step({&slice, 1});
      const float* begin = row.as<float>();
      const float* best = std::max_element(begin, begin + config_.vocab_size);
      double total = 0;
      for (int64_t v = 0; v < config_.vocab_size; ++v) total += std::exp(static_cast<double>(begin[v]) - *best);
      cost += std::log(total) / static_cast<double>(kOwnTokens);
      id = static_cast<int32_t>(best - begin);
      distinct.insert(id);
    }
    return cost < kOwnSurprise * std::log(static_cast<double>(config_.vocab_size)) &&
           static_cast<int64_t>(distinct.size()) >= kLeastDistinct;
  } catch (const Error&) {
    return false;  // it does not fit, or makes no finite logits: nothing learnt
  }
}

void Examination::explain_surprise(DeepReport& report) {
  if (!is_poor(report) || !report.can_judge_weights) return;
  const bool is_explained = has_fault(report.findings);
  if (!is_explained && mean(surprises_) > kNoise * report.uniform && options_.sample_ids.empty() && predicts_itself()) {
    report.findings.push_back(
        {Severity::kFault, "tokenizer", checkpoint_.directory() + "/tokenizer.json",
         fmt::format(
             "the model continues its own text with confidence, but text made by this tokenizer costs it {:.2f} "
             "nats a token (guessing: {:.2f}): the ids mean other tokens to the weights",
             mean(surprises_), report.uniform),
         "take tokenizer.json from the release that the weights come from"});
    return;
  }
  if (!is_explained) try_hidden_repairs(report);
  if (is_poor(report) && !has_fault(report.findings)) {
    report.findings.push_back(
        {Severity::kFault, "unexplained", checkpoint_.directory(),
         fmt::format("the sample costs {:.2f} nats a token (guessing: {:.2f}) and no known mistake "
                     "explains it",
                     mean(surprises_), report.uniform),
         "compare hashes with the original release; try --sample with text that this model knows"});
  }
}

}  // namespace tessera::doctor
