// SPDX-License-Identifier: Apache-2.0
#include "doctor/checkup.h"

#include <nlohmann/json.hpp>

#include "base/strings.h"
#include "doctor/check.h"
#include "doctor/verdict.h"

namespace tessera::doctor {

namespace {

nlohmann::ordered_json as_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    out.push_back({{"severity", std::string(to_string(finding.severity))},
                   {"kind", finding.kind},
                   {"where", printable(finding.where, 1000)},
                   {"evidence", printable(finding.evidence, 4000)},
                   {"advice", finding.advice}});
  }
  return out;
}

nlohmann::ordered_json as_json(const DeepReport& report) {
  using nlohmann::ordered_json;
  const auto number = [](const std::optional<double>& value) { return value ? ordered_json(*value) : ordered_json(); };
  ordered_json out = {{"verdict", printable(report.verdict, 16000)},
                      {"is_sound", !has_fault(report.findings)},
                      {"findings", as_json(report.findings)},
                      {"sample_tokens", report.num_tokens},
                      {"nats_per_token", number(report.surprise)},
                      {"nats_per_token_in_mode", number(report.mode_surprise)},
                      {"nats_per_token_repaired", number(report.repaired)},
                      {"nats_per_token_expected", number(report.expected)},
                      {"nats_per_token_guessing", report.uniform},
                      {"mistakes_tried", report.num_tried},
                      {"mistakes_to_try", report.num_to_try},
                      {"mode", report.mode},
                      {"can_judge_weights", report.can_judge_weights},
                      {"can_judge_text", report.can_judge_text},
                      {"layers", ordered_json::array()}};
  for (const LayerReport& layer : report.layers) {
    ordered_json worst = ordered_json::array();
    for (const OpError& op : layer.worst) worst.push_back({{"op", op.name}, {"error", op.relative}});
    out["layers"].push_back({{"layer", layer.layer},
                             {"stream_rms", layer.stream_rms},
                             {"experts_hit", layer.experts_hit},
                             {"busiest_share", layer.busiest_share},
                             {"rerouted_tokens", layer.rerouted},
                             {"largest_errors", std::move(worst)}});
  }
  return out;
}

}  // namespace

Checkup check_up(const std::string& directory, const CheckupOptions& options,
                 std::span<const ops::Backend* const> backends, const device::Machine& machine,
                 ProgressSink* progress) {
  Checkup out;
  const StructureReport structure = check_structure(directory);
  // The deep report repeats the structure's findings.
  if (!options.deep) out.findings = structure.findings;
  const auto append = [&](const std::vector<Finding>& more) {
    out.findings.insert(out.findings.end(), more.begin(), more.end());
  };
  append(check_scales(structure, progress));
  if (structure.checkpoint != nullptr) {
    // What hashes.json says already is evidence: never written over unseen.
    const std::vector<Finding> mismatches = options.writes_hashes && options.replaces_hashes
                                                ? std::vector<Finding>{}
                                                : check_hashes(*structure.checkpoint, progress, &out.num_hashed);
    append(mismatches);
    if (options.writes_hashes && has_fault(mismatches)) {
      out.findings.push_back({Severity::kFault, "hash", "hashes.json",
                              "it says otherwise than the tensors, so it was not written again",
                              "find out what changed; then --force, or remove the file first"});
    } else if (options.writes_hashes) {
      write_hashes_of(*structure.checkpoint, progress);
    }
  }
  if (options.deep) {
    DeepReport& report = out.deep.emplace(check_deep(directory, *options.deep, backends, machine, progress));
    report.findings.insert(report.findings.begin(), out.findings.begin(), out.findings.end());
    report.verdict = verdict_of(report);
    out.findings = report.findings;
  }
  return out;
}

std::string to_json(const Checkup& checkup) {
  nlohmann::ordered_json out = checkup.deep ? as_json(*checkup.deep)
                                            : nlohmann::ordered_json{{"is_sound", !has_fault(checkup.findings)},
                                                                     {"findings", as_json(checkup.findings)}};
  out["tensors_hashed"] = checkup.num_hashed;
  return out.dump();
}

}  // namespace tessera::doctor
