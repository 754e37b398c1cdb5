// SPDX-License-Identifier: Apache-2.0
// tessera verify
#include "verify/verify.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "backends/registry.h"
#include "base/atomic_file.h"
#include "base/error.h"
#include "base/strings.h"
#include "console.h"
#include "device/device_choice.h"
#include "model_flags.h"
#include "progress_bar.h"
#include "record_head.h"
#include "verb.h"

namespace tessera::app {

namespace {

using nlohmann::ordered_json;

// "bits equal", "1.2e-07 of 1e-05".
std::string error_text(const verify::Row& row) {
  if (row.bound > 0) return fmt::format("{:.1e} of {:.0e}", row.error, row.bound);
  return row.error > 0 ? "other bits" : "bits equal";
}

ordered_json json_of(const verify::Row& row) {
  ordered_json out = {{"op", row.op},
                      {"variant", row.variant},
                      {"is_reference", row.is_reference},
                      {"cases", row.num_cases},
                      {"failed", row.num_failed},
                      {"worst_error", std::isfinite(row.error) ? ordered_json(row.error) : ordered_json("not finite")},
                      {"bound", row.bound},
                      {"worst_shape", row.worst_shape},
                      {"seconds", row.seconds},
                      {"failures", ordered_json::array()},
                      {"calls", ordered_json::array()}};
  for (const verify::Call& call : row.calls) {
    out["calls"].push_back({{"shape", call.shape},
                            {"values", call.num_values},
                            {"different_values", call.num_different},
                            {"is_sound", call.is_sound}});
  }
  for (const verify::Failure& failure : row.failures) {
    out["failures"].push_back(
        {{"shape", failure.shape}, {"what", printable(failure.what, 2000)}, {"stream", failure.stream}});
  }
  return out;
}

class Verify final : public Verb {
 public:
  explicit Verify(CLI::App& app)
      : command_(app.add_subcommand(
            "verify", "Run every kernel that this machine would use against the reference, on random data")) {
    add_device_flag(*command_, device_);
    command_->add_flag("--quick", options_.is_quick, "Small shapes only: seconds instead of a minute or two");
    command_->add_option("--seed", seed_, "Of the random data, to repeat a run [a new one, which is printed]");
    command_->add_option("--threads", options_.num_threads, "Threads [one per core]")->check(CLI::Range(1, 4096));
    command_->add_option("--op", options_.op, "Only this op, as the table names it");
    command_->add_flag("--json", is_json_, "One JSON object in place of the table");
    command_->add_option("--report", report_file_, "File for that object, beside the table: the report to send us");
    command_->add_flag("--quiet", is_quiet_, "No progress");
    command_->footer(
        "\nEvery variant of every op, at odd sizes and at the shapes of DeepSeek-V4-Flash, on normal values, heavy\n"
        "tails, zeros and denormals. Outputs are poisoned with NaN before, and what lies around every array is "
        "checked\n"
        "after; on a GPU each call also runs as a recorded graph, which must give the same bits. Bounds are those of\n"
        "docs/contracts/numerics.md, section 5: \"1e-4 of 4e-3\" is the error that came closest, and what is allowed.\n"
        "Exits with 7 where a kernel is wrong. An op that nothing but the reference computes on this machine is\n"
        "run twice by the reference. Maps and experts of many tokens also run with the first five alone: same bits.\n"
        "\nExamples:\n  tessera verify\n  tessera verify --device cuda:0 --report report.json");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    options_.seed = seed_.value_or(std::random_device{}());
    const device::Machine machine = device::machine_of(device_);
    if (report_file_.has_value()) check_report_file();
    warn_of_backends(machine);
    ProgressBar progress(is_quiet_);
    const verify::Report report = verify::verify(backends::all_backends(), machine, options_, &progress);
    print_result(is_json_ ? as_json(report, machine).dump() + "\n" : as_text(report, machine));
    if (report_file_.has_value()) write_report(as_json(report, machine).dump(1) + "\n");
    return report.is_sound() ? kExitOk : kExitMismatch;
  }

 private:
  // Now, and not after minutes.
  void check_report_file() const {
    if (report_file_->empty()) fail(ErrorCode::kInvalidArgument, "--report: expected the name of a file, found none");
    const AtomicFile tried(*report_file_);
  }
  void write_report(const std::string& text) const {
    AtomicFile file(*report_file_);
    file.write(text.data(), text.size());
    file.commit();
  }

  ordered_json as_json(const verify::Report& report, const device::Machine& machine) const {
    ordered_json out = record_head("tessera verify", device_);
    out.update({{"version", TESSERA_VERSION},
                {"build", TESSERA_BUILD_TYPE},
                {"device", device_},
                {"gpu", nullptr},
                {"seed", report.seed},
                {"is_quick", options_.is_quick},
                {"seconds", report.seconds},
                {"has_recorded", report.has_recorded},
                {"num_calls", report.num_cases()},
                {"is_sound", report.is_sound()},
                {"stopped", report.stopped},
                {"unavailable", report.unavailable},
                {"rows", ordered_json::array()}});
    if (machine.gpu.has_value()) {
      out["gpu"] = {
          {"name", printable(machine.gpu->name)},
          {"compute_capability", fmt::format("{}.{}", machine.gpu->compute_major, machine.gpu->compute_minor)},
          {"memory_bytes", machine.gpu->memory_bytes}};
    }
    for (const verify::Row& row : report.rows) out["rows"].push_back(json_of(row));
    return out;
  }

  std::string as_text(const verify::Report& report, const device::Machine& machine) const {
    std::string text = fmt::format("{:<16} {:<18} {:>5}  {:<18} {}\n", "op", "variant", "cases", "worst error", "");
    int num_failed = 0;
    for (const verify::Row& row : report.rows) {
      text += fmt::format("{:<16} {:<18} {:>5}  {:<18} {}\n", row.op, row.variant, row.num_cases, error_text(row),
                          row.num_failed == 0 ? "ok" : fmt::format("FAIL in {}", row.num_failed));
      num_failed += row.num_failed;
      for (const verify::Failure& failure : row.failures) {
        text += fmt::format("  {} (number {} of seed {})\n    {}\n", failure.shape, failure.stream, report.seed,
                            printable(failure.what, 2000));
      }
    }
    const std::string where = machine.gpu.has_value() ? printable(machine.gpu->name) : machine.cpu_name;
    const std::string verdict = !report.stopped.empty()
                                    ? fmt::format("stopped: the device was lost in {}", report.stopped)
                                : num_failed > 0 ? fmt::format("{} calls FAILED", num_failed)
                                                 : std::string("all agree with the reference");
    return text + fmt::format("{}, seed {}: {} calls in {:.1f} s{}; {}\n", where, report.seed, report.num_cases(),
                              report.seconds, report.has_recorded ? ", each also as a recorded graph" : "", verdict);
  }

  CLI::App* command_;
  verify::Options options_;
  std::string device_ = "cpu";
  std::optional<std::string> report_file_;
  std::optional<uint64_t> seed_;
  bool is_json_ = false, is_quiet_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_verify(CLI::App& app) {
  return std::make_unique<Verify>(app);
}

}  // namespace tessera::app
