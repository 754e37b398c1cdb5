// SPDX-License-Identifier: Apache-2.0
// tessera check
#include "doctor/check.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backends/registry.h"
#include "base/file.h"
#include "base/strings.h"
#include "console.h"
#include "default_model.h"
#include "device/device_choice.h"
#include "doctor/deep_check.h"
#include "doctor/verdict.h"
#include "model_flags.h"
#include "progress_bar.h"
#include "verb.h"

namespace tessera::app {

namespace {

using doctor::DeepReport;
using doctor::Finding;

constexpr uint64_t kMaxSampleBytes = 1 << 20;

std::string as_text(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : doctor::condensed(findings)) {
    text += fmt::format("{:<8} {}: {}\n         {}\n", to_string(finding.severity), finding.kind, finding.where,
                        finding.evidence);
    if (!finding.advice.empty()) text += fmt::format("         do: {}\n", finding.advice);
  }
  return text;
}

std::string layers_as_text(const DeepReport& report) {
  if (report.layers.empty()) return "";
  const bool has_mode = report.mode_surprise.has_value();
  std::string text = fmt::format("layer  streams RMS  experts hit  busiest{}\n",
                                 has_mode ? "  rerouted  largest errors of " + report.mode + " on the same input" : "");
  for (const doctor::LayerReport& layer : report.layers) {
    text += fmt::format("{:>5}  {:>11.4g}  {:>4} of {:<4} {:>7.0f} %", layer.layer, layer.stream_rms, layer.experts_hit,
                        report.num_experts, 100 * layer.busiest_share);
    if (has_mode) text += fmt::format("  {:>8}", layer.rerouted);
    for (const doctor::OpError& op : layer.worst) text += fmt::format("  {} {:.2e}", op.name, op.relative);
    text += "\n";
  }
  return text;
}

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
                      {"is_sound", !doctor::has_fault(report.findings)},
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
  for (const doctor::LayerReport& layer : report.layers) {
    ordered_json worst = ordered_json::array();
    for (const doctor::OpError& op : layer.worst) worst.push_back({{"op", op.name}, {"error", op.relative}});
    out["layers"].push_back({{"layer", layer.layer},
                             {"stream_rms", layer.stream_rms},
                             {"experts_hit", layer.experts_hit},
                             {"busiest_share", layer.busiest_share},
                             {"rerouted_tokens", layer.rerouted},
                             {"largest_errors", std::move(worst)}});
  }
  return out;
}

class Check final : public Verb {
 public:
  explicit Check(CLI::App& app)
      : command_(
            app.add_subcommand("check", "Check a checkpoint: structure, scales, hashes; --deep finds what is wrong")) {
    command_->add_option("DIR", directory_, "Folder with config.json and *.safetensors [the bundled tiny-v4]");
    command_->add_flag("--deep", is_deep_,
                       "Examine every weight, run sample tokens layer by layer, and try repairs in memory");
    command_->add_flag("--write-hashes", writes_hashes_,
                       "Write hashes.json (XXH3-128 of each tensor) into DIR; not over one that says otherwise");
    command_->add_flag("--force", is_forced_, "--write-hashes: replace hashes.json whatever it says")
        ->needs("--write-hashes");
    command_->add_flag("--json", is_json_, "One JSON object");
    command_->add_option("--sample", sample_, "--deep: FILE with text that the model knows well")
        ->check(CLI::ExistingFile);
    command_->add_option("--tokens", options_.max_tokens, "--deep: most tokens of the sample to run")
        ->check(CLI::Range(2, 4096))
        ->capture_default_str();
    command_->add_option("--mode", mode_, "--deep: compare this mode with f32: f32, a16, a8 or a4")
        ->check(CLI::IsMember({"f32", "a16", "a8", "a4"}))
        ->capture_default_str();
    command_->add_option("--cache", cache_, "--deep: and these caches with exact ones: fp8 or exact")
        ->check(CLI::IsMember({"fp8", "exact"}))
        ->capture_default_str();
    command_->add_option("--threads", options_.num_threads, "Threads [one per processor]")->check(CLI::Range(1, 4096));
    add_device_flag(*command_, device_);
    command_->add_flag("--quiet", is_quiet_, "No progress");
    command_->footer(
        "\nExits with 7 where something is wrong. docs/doctor.md lists what is found and how. --deep runs the\n"
        "model on --device and on what TESSERA_BACKENDS names, as every verb does; all else is the CPU's work.\n"
        "\nExamples:\n  tessera check DIR --write-hashes\n  tessera check DIR --deep --mode a4 --device cuda:0");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    if (directory_.empty()) directory_ = default_model();
    // Before anything is read: a device that can't be used is known at once.
    const device::Machine machine = is_deep_ ? device::machine_of(device_) : device::Machine();
    if (is_deep_) warn_of_backends(machine);
    ProgressBar progress(is_quiet_);
    const doctor::StructureReport structure = doctor::check_structure(directory_);
    std::vector<Finding> findings = structure.findings;
    const auto append = [&](const std::vector<Finding>& more) {
      findings.insert(findings.end(), more.begin(), more.end());
    };
    append(doctor::check_scales(structure, &progress));
    size_t num_hashed = 0;
    if (structure.checkpoint != nullptr) {
      // What hashes.json says already is evidence: never written over unseen.
      const std::vector<Finding> mismatches = writes_hashes_ && is_forced_
                                                  ? std::vector<Finding>{}
                                                  : doctor::check_hashes(*structure.checkpoint, &progress, &num_hashed);
      append(mismatches);
      if (writes_hashes_ && doctor::has_fault(mismatches)) {
        findings.push_back({doctor::Severity::kFault, "hash", "hashes.json",
                            "it says otherwise than the tensors, so it was not written again",
                            "find out what changed; then --force, or remove the file first"});
      } else if (writes_hashes_) {
        doctor::write_hashes_of(*structure.checkpoint, &progress);
      }
    }
    DeepReport report;
    if (is_deep_) {
      options_.mode = {*ops::input_mode_from_name(mode_), *ops::cache_mode_from_name(cache_)};
      if (!sample_.empty()) options_.sample_text = read_file(sample_, kMaxSampleBytes);
      report = doctor::check_deep(directory_, options_, backends::all_backends(), machine, &progress);
      // The deep report repeats the structure's findings.
      findings.erase(findings.begin(), findings.begin() + static_cast<int64_t>(structure.findings.size()));
      report.findings.insert(report.findings.begin(), findings.begin(), findings.end());
      report.verdict = doctor::verdict_of(report);
    }
    print(is_deep_ ? report.findings : findings, report, num_hashed);
    return doctor::has_fault(is_deep_ ? report.findings : findings) ? kExitMismatch : kExitOk;
  }

 private:
  void print(const std::vector<Finding>& findings, const DeepReport& report, size_t num_hashed) const {
    if (is_json_) {
      nlohmann::ordered_json out = is_deep_ ? as_json(report)
                                            : nlohmann::ordered_json{{"is_sound", !doctor::has_fault(findings)},
                                                                     {"findings", as_json(findings)}};
      out["tensors_hashed"] = num_hashed;
      print_result(out.dump() + "\n");
      return;
    }
    std::string text = as_text(findings);
    if (num_hashed > 0) text += fmt::format("{} tensors compared with hashes.json\n", num_hashed);
    if (is_deep_) {
      text += layers_as_text(report) + "\n" + report.verdict + "\n";
    } else {
      text += doctor::has_fault(findings) ? "Something is wrong; --deep may say more.\n"
                                          : "No fault found in structure and scales; --deep looks at the weights.\n";
    }
    print_result(text);
  }

  CLI::App* command_;
  doctor::DeepOptions options_;
  std::string directory_, sample_, mode_ = "a16", cache_ = "fp8", device_ = "cpu";
  bool is_deep_ = false, writes_hashes_ = false, is_forced_ = false, is_json_ = false, is_quiet_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_check(CLI::App& app) {
  return std::make_unique<Check>(app);
}

}  // namespace tessera::app
