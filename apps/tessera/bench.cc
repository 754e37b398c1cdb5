// SPDX-License-Identifier: Apache-2.0
// tessera bench ops
#include "bench/ops/bench_ops.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/env.h"
#include "base/error.h"
#include "console.h"
#include "ops/planner.h"
#include "verb.h"

namespace tessera::app {

namespace {

double rate(int64_t amount, const bench::Samples& samples) {
  return static_cast<double>(amount) / samples.quantile(0.5) * 1e-9;
}

nlohmann::ordered_json json_of(const bench::Report& report) {
  nlohmann::ordered_json out = {{"cpu", device::probe_machine().cpu_name},
                                {"threads", report.num_threads},
                                {"read_gbs", report.ceilings.read_gbs},
                                {"read_one_thread_gbs", report.ceilings.read_one_gbs},
                                {"avx512_bf16_gflops", report.ceilings.bf16_gflops},
                                {"amx_bf16_gflops", report.ceilings.amx_gflops},
                                {"rows", nlohmann::ordered_json::array()}};
  for (const bench::Row& row : report.rows) {
    out["rows"].push_back({{"name", row.name},
                           {"variant", row.variant},
                           {"tokens", row.tokens},
                           {"bytes", row.bytes},
                           {"flops", row.flops},
                           {"median_us", row.time.quantile(0.5) * 1e6},
                           {"p10_us", row.time.quantile(0.1) * 1e6},
                           {"p90_us", row.time.quantile(0.9) * 1e6},
                           {"read_p10_us", row.read_time.quantile(0.1) * 1e6},
                           {"read_median_us", row.read_time.quantile(0.5) * 1e6},
                           {"share_of_read", row.read_time.quantile(0.5) / row.time.quantile(0.5)},
                           {"seconds", row.time.seconds}});
  }
  return out;
}

class Bench final : public Verb {
 public:
  explicit Bench(CLI::App& app) : command_(app.add_subcommand("bench", "Measure this machine")) {
    command_->require_subcommand(1);
    ops_ = command_->add_subcommand("ops",
                                    "Linear maps and experts at the shapes of Flash and Pro, beside what memory "
                                    "and arithmetic allow in the same run");
    ops_->add_option("--tokens", options_.tokens, "Tokens per call, comma-separated")->delimiter(',');
    ops_->add_option("--only", options_.only, "Rows whose name contains this");
    ops_->add_option("--mode", mode_, "Inputs of NVFP4 maps: a16, a8 or a4");
    ops_->add_option("--threads", options_.num_threads, "Threads (default: one per core)");
    ops_->add_option("--seconds", options_.seconds, "At least so long per row");
    ops_->add_flag("--json", is_json_, "One JSON object, with every sample");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    const auto mode = ops::input_mode_from_name(mode_);
    if (!mode || *mode == ops::InputMode::kF32) {
      fail(ErrorCode::kInvalidArgument, fmt::format("--mode: expected a16, a8 or a4, found \"{}\"", mode_));
    }
    for (const int64_t tokens : options_.tokens) {
      if (tokens < 1 || tokens > 65536) {
        fail(ErrorCode::kInvalidArgument, fmt::format("--tokens: expected 1 to 65536, found {}", tokens));
      }
    }
    options_.mode = *mode;
    options_.forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
    bool has_head = false;
    const bench::Report report = bench::run_ops(options_, [&](const bench::Report& all, const bench::Row& row) {
      if (is_json_) return;
      if (!has_head) {
        print_result(
            fmt::format("read {:.1f} GB/s with {} threads, {:.1f} with one; BF16 products {:.0f} GFLOP/s, AMX "
                        "{:.0f}\n{:<62} {:>12} {:>6} {:>10} {:>8} {:>7} {:>9}\n",
                        all.ceilings.read_gbs, all.num_threads, all.ceilings.read_one_gbs, all.ceilings.bf16_gflops,
                        all.ceilings.amx_gflops, "op", "variant", "tokens", "us", "GB/s", "of read", "GFLOP/s"));
        has_head = true;
      }
      print_result(fmt::format("{:<62} {:>12} {:>6} {:>10.1f} {:>8.2f} {:>6.0f}% {:>9.1f}\n", row.name, row.variant,
                               row.tokens, row.time.quantile(0.5) * 1e6, rate(row.bytes, row.time),
                               100 * row.read_time.quantile(0.5) / row.time.quantile(0.5), rate(row.flops, row.time)));
    });
    if (is_json_) print_result(json_of(report).dump() + "\n");
    return kExitOk;
  }

 private:
  CLI::App *command_, *ops_;
  bench::Options options_;
  std::string mode_ = "a16";
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_bench(CLI::App& app) {
  return std::make_unique<Bench>(app);
}

}  // namespace tessera::app
