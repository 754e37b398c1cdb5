// SPDX-License-Identifier: Apache-2.0
#include "doctor/finding.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace tessera::doctor {

namespace {

// "layers.3.ffn.experts.12.w1" -> "layers.*.ffn.experts.*.w1": what findings of one cause have in common.
std::string pattern_of(const std::string& where) {
  std::string pattern;
  for (size_t i = 0; i < where.size(); ++i) {
    const bool is_digit = where[i] >= '0' && where[i] <= '9';
    const bool begins = i > 0 && where[i - 1] == '.';
    if (is_digit && begins) {
      pattern += '*';
      while (i + 1 < where.size() && where[i + 1] >= '0' && where[i + 1] <= '9') ++i;
      continue;
    }
    pattern += where[i];
  }
  return pattern;
}

}  // namespace

std::string_view to_string(Severity severity) {
  switch (severity) {
    case Severity::kNote:
      return "note";
    case Severity::kWarning:
      return "warning";
    case Severity::kFault:
      return "fault";
  }
  return "?";
}

std::vector<Finding> condensed(const std::vector<Finding>& findings) {
  std::vector<Finding> out;
  std::vector<std::string> patterns;
  std::map<std::string, size_t> place;
  std::vector<size_t> counts;
  for (const Finding& finding : findings) {
    const std::string pattern = pattern_of(finding.where);
    const std::string key = fmt::format("{} {} {}", static_cast<int>(finding.severity), finding.kind, pattern);
    const auto [at, is_new] = place.emplace(key, out.size());
    if (is_new) {
      out.push_back(finding);
      patterns.push_back(pattern);
      counts.push_back(1);
    } else {
      ++counts[at->second];
    }
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (counts[i] > 1) out[i].where += fmt::format(" and {} more of {}", counts[i] - 1, patterns[i]);
  }
  std::stable_sort(out.begin(), out.end(), [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  return out;
}

bool has_fault(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return finding.severity == Severity::kFault; });
}

}  // namespace tessera::doctor
