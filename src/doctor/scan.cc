// SPDX-License-Identifier: Apache-2.0
// Mistakes that leave no trace in the weights, tried one by one on the sample. A trained model sits at an optimum: any
// factor, sign or shift of one of its parts makes the sample likelier only where it undoes a mistake.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "doctor/examination.h"

namespace tessera::doctor {

namespace {

// What a try must gain: this many standard errors of the tokens' own differences, this share of the cost, these nats.
constexpr double kManyErrors = 4, kLeastShare = 0.1, kLeastGain = 0.02;
constexpr double kFarFromGuessing = 0.5;  // share of ln(vocabulary) that a repaired model stays below
// Weights that may be run through for trials: everything is tried on a small model, the likeliest on a large one.
constexpr uint64_t kMaxBytesTried = uint64_t{64} << 30;
// A first look, at the sample's first tokens; what helps there is tried on all.
constexpr int64_t kScreenTokens = 40;
// A matrix that is wrong by a factor lies that far from its siblings, give or take what healthy ones differ (log2).
constexpr double kOffLeast = 0.25, kOffMost = 1.75;
constexpr int64_t kLeastSiblings = 4;
constexpr double kFactors[] = {0.5, 2, -1};

std::string text_of(double factor) {
  if (factor == -1) return "its sign is wrong";
  return factor < 1 ? fmt::format("it is too large by a factor of {:g}", 1 / factor)
                    : fmt::format("it is too small by a factor of {:g}", factor);
}

}  // namespace

void Examination::set_deviations(const std::vector<MatrixFacts>& matrices) {
  for (const MatrixFacts& facts : matrices) deviations_[facts.name] = facts.off;
}

// Matrices whose size and sign matter: what a norm follows (wq_a, wq_b, wkv, the compressors) is left out. wo_a and
// wo_b are applied one after the other, as are w3 and w2: one of each pair is tried, and the one that is out of line
// with its siblings is named.
std::vector<Hypothesis> Examination::scan_hypotheses() const {
  std::vector<Hypothesis> out;
  const auto add = [&](const std::string& where, const std::vector<std::string>& tensors, double factor,
                       const std::string& claim) {
    Hypothesis hypothesis{{Severity::kFault, factor < 0 ? "sign" : "scale-size", where, claim,
                           "take the tensor and its scales from the original, or convert it again"},
                          {}};
    for (const std::string& tensor : tensors) {
      hypothesis.repairs.push_back({.kind = RepairKind::kMultiply, .tensor = tensor, .factor = factor});
    }
    out.push_back(std::move(hypothesis));
  };
  struct Pair {
    const char *tried, *partner;  // partner: empty for none
  };
  constexpr Pair kPairs[] = {{"attn.wo_b", "attn.wo_a"},
                             {"ffn.shared_experts.w2", "ffn.shared_experts.w3"},
                             {"ffn.shared_experts.w1", ""},
                             {"ffn.experts.*.w2", "ffn.experts.*.w3"},
                             {"ffn.experts.*.w1", ""}};
  const auto tensors_of = [&](int64_t layer, const std::string& matrix) {
    const std::string name = fmt::format("layers.{}.{}", layer, matrix);
    const size_t star = name.find('*');
    std::vector<std::string> tensors;
    if (star == std::string::npos) return std::vector<std::string>{name};
    for (int64_t e = 0; e < config_.num_experts; ++e) {
      tensors.push_back(name.substr(0, star) + fmt::format("{}", e) + name.substr(star + 1));
    }
    return tensors;
  };
  for (const double factor : kFactors) {
    for (const Pair& pair : kPairs) {
      const auto claim = [&](const std::string& where, double tried, double partner) {
        // A deviation of log2(factor) from the siblings is what the repair would undo.
        if (pair.partner[0] == '\0') return std::pair{where, text_of(factor)};
        const double wanted = factor > 0 ? -std::log2(factor) : 0;
        const std::string other = where.substr(0, where.size() - std::string(pair.tried).size()) + pair.partner;
        if (factor > 0 && std::abs(partner - wanted) + 0.3 < std::abs(tried - wanted)) {
          return std::pair{other, text_of(factor)};
        }
        if (factor > 0 && std::abs(tried - wanted) + 0.3 < std::abs(partner - wanted)) {
          return std::pair{where, text_of(factor)};
        }
        return std::pair{where, fmt::format("it, or {} beside it: {}", pair.partner, text_of(factor))};
      };
      std::vector<std::string> all;
      for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
        const std::vector<std::string> tensors = tensors_of(layer, pair.tried);
        all.insert(all.end(), tensors.begin(), tensors.end());
        const auto off = [&](const std::string& matrix) {
          const auto at = deviations_.find(tensors_of(layer, matrix).front());
          return at == deviations_.end() ? 0.0 : at->second;
        };
        const double tried = off(pair.tried), partner = pair.partner[0] == '\0' ? 0 : off(pair.partner);
        const auto is_off = [&](double x) { return -x * std::log2(factor) > kOffLeast && std::abs(x) < kOffMost; };
        if (factor > 0 && config_.num_layers >= kLeastSiblings && !is_off(tried) && !is_off(partner)) continue;
        const auto [where, text] = claim(fmt::format("layers.{}.{}", layer, pair.tried), tried, partner);
        add(where, tensors, factor, text);
      }
      const auto [where, text] = claim(fmt::format("layers.*.{}", pair.tried), 0, 0);
      add(where, all, factor, text + ", in every layer");
    }
  }
  // Where scales and codes lay a row apart, either may have been the one that moved.
  for (const auto& [tensor, repairs] : plan_.by_tensor()) {
    const ScaleOrder order = repairs.back().order;
    if (order != ScaleOrder::kRowLater && order != ScaleOrder::kRowEarlier) continue;
    for (const int64_t shift : {1, -1}) {
      out.push_back(
          {{Severity::kFault, "row-order", tensor,
            fmt::format("not its scales but its codes moved: they lie one row too {}", shift > 0 ? "late" : "early"),
            "copy the tensor from the original"},
           {{.kind = RepairKind::kRollRows, .tensor = tensor, .shift = shift}}});
    }
  }
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    if (!config_.is_hashed(layer)) continue;
    const std::string table = fmt::format("layers.{}.ffn.gate.tid2eid", layer);
    for (const int64_t shift : {1, -1}) {
      out.push_back({{Severity::kFault, "table-order", table,
                      fmt::format("its rows lie one token id too {}", shift > 0 ? "late" : "early"),
                      "copy the table from the original"},
                     {{.kind = RepairKind::kRollRows, .tensor = table, .shift = shift}}});
    }
  }
  return out;
}

bool Examination::is_convincing(const Comparison& comparison) const {
  const double limit = kFarFromGuessing * std::log(static_cast<double>(config_.vocab_size));
  return comparison.gain > kLeastGain && comparison.gain > kManyErrors * comparison.error &&
         comparison.gain > kLeastShare * comparison.before && comparison.after < limit;
}

// Tries each alone, then accepts those that help, the best first, as long as each still helps beside the ones before.
void Examination::try_hypotheses(std::vector<Hypothesis> hypotheses, Stop stop, DeepReport& report,
                                 ProgressSink* progress) {
  struct Promise {
    size_t index;
    double gain;
  };
  std::vector<Promise> promises;
  const uint64_t layer_bytes = weights_.total_bytes() / static_cast<uint64_t>(std::max<int64_t>(1, config_.num_layers));
  report.num_to_try += static_cast<int64_t>(hypotheses.size());
  if (progress != nullptr) progress->begin("try mistakes", hypotheses.size(), "tries");
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    if (progress != nullptr) progress->advance(1);
    RepairPlan plan = plan_;
    for (const Repair& repair : hypotheses[i].repairs) plan.add(repair);
    const uint64_t bytes =
        layer_bytes * static_cast<uint64_t>(config_.num_layers - plan.first_layer(config_.num_layers));
    if (bytes_tried_ + bytes > kMaxBytesTried) continue;
    bytes_tried_ += bytes;
    ++report.num_tried;
    const Score screened = trials_->run(plan, kScreenTokens);
    const Comparison comparison =
        compare({score_.surprises.begin(), score_.surprises.begin() + static_cast<int64_t>(screened.surprises.size())},
                screened.surprises);
    if (comparison.gain > kLeastGain && comparison.gain > comparison.error) promises.push_back({i, comparison.gain});
    if (stop == Stop::kWhenExplained && is_convincing(comparison) && !is_poor(screened)) break;
  }
  if (progress != nullptr) progress->end();
  std::stable_sort(promises.begin(), promises.end(),
                   [](const Promise& a, const Promise& b) { return a.gain > b.gain; });
  for (const Promise& promise : promises) {
    Hypothesis& hypothesis = hypotheses[promise.index];
    RepairPlan plan = plan_;
    for (const Repair& repair : hypothesis.repairs) plan.add(repair);
    Score after = trials_->run(plan);
    const Comparison comparison = compare(score_.surprises, after.surprises);
    if (!is_convincing(comparison)) continue;
    plan_ = std::move(plan), score_ = std::move(after);
    hypothesis.finding.evidence +=
        fmt::format("; undone in memory, the sample costs {:.3f} instead of {:.3f} nats a token", comparison.after,
                    comparison.before);
    report.findings.push_back(std::move(hypothesis.finding));
    report.repaired = score_.mean();
  }
}

void Examination::scan(DeepReport& report, ProgressSink* progress) {
  if (!report.can_judge_text || !report.can_judge_weights) return;
  // A wrong setting is not undone in the runs that trials compare with.
  const bool has_wrong_setting = std::any_of(report.findings.begin(), report.findings.end(), [](const Finding& f) {
    return f.severity == Severity::kFault && (f.kind == "config" || f.kind == "tokenizer");
  });
  if (has_wrong_setting) return;
  // Once a fault is named and mending it leaves a sample that costs no more than expected, a new check can say more.
  if (has_fault(report.findings) && !costs_too_much(score_)) return;
  std::vector<Hypothesis> hypotheses = scan_hypotheses();
  // The most suspicious come first where not all can be tried.
  const auto suspicion = [&](const Hypothesis& hypothesis) {
    const auto at = deviations_.find(hypothesis.repairs.front().tensor);
    return at == deviations_.end() ? 0 : std::abs(at->second);
  };
  std::stable_sort(hypotheses.begin(), hypotheses.end(),
                   [&](const Hypothesis& a, const Hypothesis& b) { return suspicion(a) > suspicion(b); });
  try_hypotheses(std::move(hypotheses), Stop::kNever, report, progress);
}

}  // namespace tessera::doctor
