// SPDX-License-Identifier: Apache-2.0
#include "doctor/verdict.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::doctor {

namespace {

constexpr size_t kNamed = 4;

std::string faults_in_words(const std::vector<Finding>& faults, const DeepReport& report) {
  std::string text = faults.size() == 1 ? "One thing is wrong." : fmt::format("{} things are wrong.", faults.size());
  for (size_t i = 0; i < std::min(kNamed, faults.size()); ++i) {
    text += fmt::format(" {}: {}. Do: {}.", faults[i].where, faults[i].evidence, faults[i].advice);
  }
  if (faults.size() > kNamed) text += fmt::format(" And {} more, listed above.", faults.size() - kNamed);
  const bool is_all_tried = report.num_to_try > 0;
  if (report.repaired && report.surprise && *report.repaired < *report.surprise - 0.01) {
    text += fmt::format(" With the repairs made in memory the sample costs {:.3f} nats a token instead of {:.3f}.",
                        *report.repaired, *report.surprise);
  }
  if (!is_all_tried && report.surprise) text += " Check again once that is mended: more may show then.";
  return text;
}

std::string cannot_judge(const DeepReport& report) {
  std::string text;
  if (!report.can_judge_weights) {
    text +=
        " Cannot judge whether weights are in the right order: no matrix is kin to another, as in an untrained "
        "(random) model.";
  }
  if (!report.can_judge_text) {
    text += " Cannot judge by text: there is no tokenizer that can be used.";
  } else if (!report.can_judge_weights && report.surprise) {
    text += fmt::format(" The sample costs {:.2f} nats a token, guessing {:.2f}.", *report.surprise, report.uniform);
  }
  return text;
}

std::string cost_of(const DeepReport& report) {
  std::string text = fmt::format("the sample costs {:.3f} nats a token in f32 x exact", *report.surprise);
  if (report.mode_surprise) text += fmt::format(", {:.3f} in {}", *report.mode_surprise, report.mode);
  return text + fmt::format("; the model itself expects {:.3f}, guessing costs {:.2f}", report.expected.value_or(0),
                            report.uniform);
}

std::string what_was_tested(const DeepReport& report) {
  std::string text =
      " Tested: structure, scales, order of codes, rows, experts and their router, sizes against sibling layers";
  text += report.num_tried == report.num_to_try
              ? fmt::format(
                    ", and {} mistakes that leave no trace (factors and signs of whole matrices, shifted tables, "
                    "settings), none of which helps when undone.",
                    report.num_tried)
              : fmt::format(
                    ", and {} of {} mistakes that leave no trace, the most suspicious ones: more would read the "
                    "weights too often.",
                    report.num_tried, report.num_to_try);
  text += fmt::format(
      " Not tested: signs of single experts, what only texts beyond {} tokens use, and what the sample costs the "
      "original: only its hashes, or the same check on it, can say.",
      report.num_tokens);
  return text;
}

std::string without_fault(const DeepReport& report, const std::vector<Finding>& warnings) {
  const bool can_judge = report.can_judge_weights && report.can_judge_text && report.surprise;
  if (!can_judge) return "No fault found." + cannot_judge(report);
  const bool is_sure = warnings.empty() && report.num_tried == report.num_to_try;
  return (is_sure ? "Healthy as far as was tested: " : "No fault is proved: ") + cost_of(report) + "." +
         what_was_tested(report);
}

}  // namespace

std::string verdict_of(const DeepReport& report) {
  const std::vector<Finding> findings = condensed(report.findings);
  std::vector<Finding> faults, warnings;
  for (const Finding& finding : findings) {
    if (finding.severity == Severity::kFault) faults.push_back(finding);
    if (finding.severity == Severity::kWarning) warnings.push_back(finding);
  }
  if (!faults.empty()) return faults_in_words(faults, report);
  std::string text = without_fault(report, warnings);
  if (!warnings.empty()) {
    text += fmt::format(" {} to look at, first: {}: {}.", warnings.size() == 1 ? "One warning" : "Some warnings",
                        warnings.front().where, warnings.front().evidence);
  }
  return text;
}

}  // namespace tessera::doctor
