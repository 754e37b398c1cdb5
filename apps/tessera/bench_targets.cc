// SPDX-License-Identifier: Apache-2.0
#include "bench_targets.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "console.h"
#include "device/device_choice.h"
#include "model_flags.h"
#include "record_head.h"

namespace tessera::app {

namespace {

using nlohmann::ordered_json;

ordered_json json_of(const bench::TargetRow& row) {
  ordered_json out = {{"part", row.part},
                      {"name", row.name},
                      {"variant", row.variant},
                      {"tokens", row.tokens},
                      {"bytes", row.bytes},
                      {"flops", row.flops},
                      {"calls_per_sample", row.calls},
                      {"median_us", row.us()},
                      {"p10_us", row.time.quantile(0.1) * 1e6},
                      {"p90_us", row.time.quantile(0.9) * 1e6}};
  if (!row.read_time.seconds.empty()) {
    out["read_median_us"] = row.read_time.quantile(0.5) * 1e6;
    out["share_of_read"] = row.share_of_read();
  }
  if (row.flops > 0) out["tflops"] = row.tflops();
  if (row.has_target()) out["target"] = to_string(row.target), out["reached"] = row.reached();
  out["seconds"] = row.time.seconds;
  out["read_seconds"] = row.read_time.seconds;
  if (row.launches.empty()) return out;
  out["launches"] = ordered_json::array();
  for (const bench::LaunchTime& launch : row.launches) {
    out["launches"].push_back({{"kernel", launch.kernel}, {"op", launch.op}, {"adds_us", launch.seconds * 1e6}});
  }
  return out;
}

ordered_json json_of(const bench::TargetReport& report, const bench::TargetOptions& options) {
  const bench::Ceilings& ceilings = report.ceilings;
  ordered_json out =
      record_head(options.is_small ? "tessera bench targets --small" : "tessera bench targets", options.device);
  out.update({{"device", report.device},
              {"mode", "a16"},
              {"read_gbs", ceilings.read_gbs.best},
              {"copy_gbs", ceilings.copy_gbs.best},
              {"mma_bf16_gflops", ceilings.mma_gflops.best},
              {"seconds", report.seconds},
              {"rows", ordered_json::array()}});
  for (const bench::TargetRow& row : report.rows) out["rows"].push_back(json_of(row));
  return out;
}

void print_row(const bench::TargetRow& row) {
  const std::string read = row.read_time.seconds.empty() ? "" : fmt::format("{:.0f} %", 100 * row.share_of_read());
  const std::string products = row.flops > 0 ? fmt::format("{:.1f}", row.tflops()) : "";
  const std::string verdict = !row.has_target()    ? ""
                              : row.reached() >= 1 ? "reached"
                                                   : fmt::format("{:.0f} % of it", 100 * row.reached());
  print_result(fmt::format("{:<22} {:<62.62} {:>6} {:>10.1f} {:>9.1f} {:>8} {:>8} {:>17} {}\n", row.part, row.name,
                           row.tokens, row.us(), (row.time.quantile(0.9) - row.time.quantile(0.1)) * 1e6, read,
                           products, to_string(row.target), verdict));
  for (const bench::LaunchTime& launch : row.launches) {
    print_result(fmt::format("{:<22}   {:>7.1f} us  {:<26} {}\n", "", launch.seconds * 1e6, launch.kernel, launch.op));
  }
}

}  // namespace

BenchTargets::BenchTargets(CLI::App& bench)
    : command_(bench.add_subcommand("targets",
                                    "What Tessera wants to reach on one H200, measured: experts, maps, attention, "
                                    "indexer, layers by kernel")) {
  command_->add_option("--only", options_.only, "Rows whose name contains this; of layers \"layer\", \"layer csa\"");
  command_->add_option("--seconds", options_.seconds, "At least so long per row")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command_->add_flag("--small", options_.is_small, "Small shapes, few tokens: whether all of it runs, not how fast");
  command_->add_option("--record", record_, "Also write all samples, as JSON")->type_name("FILE.json");
  add_device_flag(*command_, options_.device);
}

void BenchTargets::run(const std::vector<std::pair<std::string, std::string>>& forced) {
  options_.forced = forced;
  warn_of_backends(device::machine_of(options_.device));
  // Opened before anything is measured.
  const std::unique_ptr<AtomicFile> file = record_.empty() ? nullptr : std::make_unique<AtomicFile>(record_);
  print_result(fmt::format("{:<22} {:<62} {:>6} {:>10} {:>9} {:>8} {:>8} {:>17}\n", "part", "row", "tokens", "us",
                           "p90-p10", "of read", "TFLOP/s", "target"));
  const bench::TargetReport report = bench::run_targets(options_, print_row);
  print_result(fmt::format("{}: {} rows in {:.0f} s\n", report.device, report.rows.size(), report.seconds));
  if (file == nullptr) return;
  const std::string text = json_of(report, options_).dump() + "\n";
  file->write(text.data(), text.size());
  file->commit();
}

}  // namespace tessera::app
