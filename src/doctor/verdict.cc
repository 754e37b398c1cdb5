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
  if (report.repaired && report.surprise && *report.repaired < *report.surprise - 0.01) {
    text += fmt::format(" With the repairs made in memory the sample costs {:.3f} nats a token instead of {:.3f}.",
                        *report.repaired, *report.surprise);
  }
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

}  // namespace

std::string verdict_of(const DeepReport& report) {
  const std::vector<Finding> findings = condensed(report.findings);
  std::vector<Finding> faults, warnings;
  for (const Finding& finding : findings) {
    if (finding.severity == Severity::kFault) faults.push_back(finding);
    if (finding.severity == Severity::kWarning) warnings.push_back(finding);
  }
  if (!faults.empty()) return faults_in_words(faults, report);
  std::string text = "No fault found.";
  if (report.can_judge_weights && report.can_judge_text && report.surprise) {
    text = fmt::format("Healthy: the sample costs {:.3f} nats a token in f32 x exact", *report.surprise);
    if (report.mode_surprise) text += fmt::format(", {:.3f} in {}", *report.mode_surprise, report.mode);
    text += fmt::format(" (guessing: {:.2f}).", report.uniform);
  } else {
    text += cannot_judge(report);
  }
  if (!warnings.empty()) {
    text += fmt::format(" {} to look at, first: {}: {}.", warnings.size() == 1 ? "One warning" : "Some warnings",
                        warnings.front().where, warnings.front().evidence);
  }
  return text;
}

}  // namespace tessera::doctor
