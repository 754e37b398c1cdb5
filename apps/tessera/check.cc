// SPDX-License-Identifier: Apache-2.0
// tessera check
#include "doctor/checkup.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "backends/registry.h"
#include "base/file.h"
#include "console.h"
#include "default_model.h"
#include "device/device_choice.h"
#include "doctor/finding.h"
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
    command_->add_option("--tokens", deep_.max_tokens, "--deep: most tokens of the sample to run")
        ->check(CLI::Range(2, 4096))
        ->capture_default_str();
    command_->add_option("--mode", mode_, "--deep: compare this mode with f32: f32, a16, a8 or a4")
        ->check(CLI::IsMember({"f32", "a16", "a8", "a4"}))
        ->capture_default_str();
    command_->add_option("--cache", cache_, "--deep: and these caches with exact ones: fp8 or exact")
        ->check(CLI::IsMember({"fp8", "exact"}))
        ->capture_default_str();
    command_->add_option("--threads", deep_.num_threads, "Threads [one per processor]")->check(CLI::Range(1, 4096));
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
    doctor::CheckupOptions options{writes_hashes_, is_forced_, std::nullopt};
    if (is_deep_) {
      deep_.mode = {*ops::input_mode_from_name(mode_), *ops::cache_mode_from_name(cache_)};
      if (!sample_.empty()) deep_.sample_text = read_file(sample_, kMaxSampleBytes);
      options.deep = deep_;
    }
    const doctor::Checkup checkup = doctor::check_up(directory_, options, backends::all_backends(), machine, &progress);
    print(checkup);
    return doctor::has_fault(checkup.findings) ? kExitMismatch : kExitOk;
  }

 private:
  void print(const doctor::Checkup& checkup) const {
    if (is_json_) {
      print_result(doctor::to_json(checkup) + "\n");
      return;
    }
    std::string text = as_text(checkup.findings);
    if (checkup.num_hashed > 0) text += fmt::format("{} tensors compared with hashes.json\n", checkup.num_hashed);
    if (checkup.deep) {
      text += layers_as_text(*checkup.deep) + "\n" + checkup.deep->verdict + "\n";
    } else {
      text += doctor::has_fault(checkup.findings)
                  ? "Something is wrong; --deep may say more.\n"
                  : "No fault found in structure and scales; --deep looks at the weights.\n";
    }
    print_result(text);
  }

  CLI::App* command_;
  doctor::DeepOptions deep_;
  std::string directory_, sample_, mode_ = "a16", cache_ = "fp8", device_ = "cpu";
  bool is_deep_ = false, writes_hashes_ = false, is_forced_ = false, is_json_ = false, is_quiet_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_check(CLI::App& app) {
  return std::make_unique<Check>(app);
}

}  // namespace tessera::app
