// SPDX-License-Identifier: Apache-2.0
// tessera bench ops, tessera bench model
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/env.h"
#include "base/error.h"
#include "bench/e2e/bench_model.h"
#include "bench/ops/bench_ops.h"
#include "console.h"
#include "default_model.h"
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

double median(const std::vector<double>& values) {
  return bench::Samples{values}.quantile(0.5);
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
    ops_->add_option("--seconds", options_.seconds, "At least so long per row");
    model_ = command_->add_subcommand("model", "Prefill and greedy decode of one sequence, tokens per second");
    model_->add_option("--model", model_options_.directory, "Folder [the bundled tiny-v4, or TESSERA_MODEL]");
    model_->add_option("--contexts", model_options_.contexts, "Prompt lengths, comma-separated")->delimiter(',');
    model_->add_option("--decode", model_options_.decode_tokens, "Tokens made after each prompt");
    model_->add_option("--repeats", model_options_.repeats, "Runs; the median is shown");
    for (CLI::App* verb : {ops_, model_}) {
      verb->add_option("--mode", mode_, "Inputs of linear maps: a16, a8 or a4; model: also f32");
      verb->add_option("--threads", num_threads_, "Threads (default: one per core)");
      verb->add_flag("--json", is_json_, "One JSON object, with every sample");
    }
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    const auto mode = ops::input_mode_from_name(mode_);
    if (!mode || (*mode == ops::InputMode::kF32 && ops_->parsed())) {
      fail(ErrorCode::kInvalidArgument, fmt::format("--mode: expected a16, a8 or a4, found \"{}\"", mode_));
    }
    check("--threads", num_threads_, 0, 4096);
    const auto forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
    if (ops_->parsed()) {
      options_.mode = *mode;
      options_.num_threads = num_threads_;
      options_.forced = forced;
      for (const int64_t tokens : options_.tokens) check("--tokens", tokens, 1, 65536);
      return run_ops();
    }
    model_options_.load.precision.input = *mode;
    model_options_.load.num_threads = num_threads_;
    model_options_.load.forced = forced;
    model_options_.load.with_draft = false;
    for (const int64_t context : model_options_.contexts) check("--contexts", context, 1, 1 << 20);
    check("--decode", model_options_.decode_tokens, 1, 1 << 20);
    check("--repeats", model_options_.repeats, 1, 1000);
    return run_model();
  }

 private:
  static void check(const char* flag, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {} to {}, found {}", flag, least, most, value));
  }

  int run_ops() {
    bool has_head = false;
    const bench::Report report = bench::run_ops(options_, [&](const bench::Report& all, const bench::Row& row) {
      if (is_json_) return;
      if (!has_head) {
        print_result(
            fmt::format("read {:.1f} GB/s with {} threads, {:.1f} with one; BF16 products {:.0f} GFLOP/s, AMX "
                        "{:.0f}\n{:<62} {:>12} {:>6} {:>10} {:>8} {:>8} {:>9}\n",
                        all.ceilings.read_gbs, all.num_threads, all.ceilings.read_one_gbs, all.ceilings.bf16_gflops,
                        all.ceilings.amx_gflops, "op", "variant", "tokens", "us", "GB/s", "of read", "GFLOP/s"));
        has_head = true;
      }
      print_result(fmt::format("{:<62} {:>12} {:>6} {:>10.1f} {:>8.2f} {:>7.0f}% {:>9.1f}\n", row.name, row.variant,
                               row.tokens, row.time.quantile(0.5) * 1e6, rate(row.bytes, row.time),
                               100 * row.read_time.quantile(0.5) / row.time.quantile(0.5), rate(row.flops, row.time)));
    });
    if (is_json_) print_result(json_of(report).dump() + "\n");
    return kExitOk;
  }

  int run_model() {
    if (model_options_.directory.empty()) model_options_.directory = default_model();
    const auto rows = bench::run_model(model_options_, [&](const bench::ModelRow& row) {
      if (is_json_) return;
      print_result(fmt::format("context {:>6}   prefill {:>9.0f} tokens/s   decode {:>8.0f} tokens/s\n", row.context,
                               median(row.prefill_tokens_per_second), median(row.decode_tokens_per_second)));
    });
    if (!is_json_) return kExitOk;
    nlohmann::ordered_json out = {{"cpu", device::probe_machine().cpu_name}, {"mode", mode_}};
    out["rows"] = nlohmann::ordered_json::array();
    for (const bench::ModelRow& row : rows) {
      out["rows"].push_back({{"context", row.context},
                             {"prefill_tokens_per_second", row.prefill_tokens_per_second},
                             {"decode_tokens_per_second", row.decode_tokens_per_second}});
    }
    print_result(out.dump() + "\n");
    return kExitOk;
  }

  CLI::App *command_, *ops_, *model_;
  bench::Options options_;
  bench::ModelOptions model_options_;
  std::string mode_ = "a16";
  int num_threads_ = 0;
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_bench(CLI::App& app) {
  return std::make_unique<Bench>(app);
}

}  // namespace tessera::app
