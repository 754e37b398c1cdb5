// SPDX-License-Identifier: Apache-2.0
#include "bench_layer.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/plot.h"
#include "base/strings.h"
#include "console.h"
#include "model_flags.h"
#include "record_head.h"

namespace tessera::app {

namespace {

std::string ceilings_of(const bench::LayerReport& report) {
  if (report.is_on_gpu) return fmt::format("{}: read {:.0f} GB/s", report.device, report.ceilings.read_gbs.best);
  return fmt::format("read {:.1f} GB/s with {} threads", report.ceilings.read_gbs.best, report.num_threads);
}

nlohmann::ordered_json json_of(const bench::LayerReport& report, const bench::LayerOptions& options) {
  nlohmann::ordered_json out = record_head("tessera bench layer", options.device);
  out.update({{"shape", options.shape},
              {"device", report.device},
              {"threads", report.num_threads},
              {"mode", to_string(options.load.precision.input)},
              {"dense", ops::to_string(options.dense)},
              {"context", report.context},
              {"read_gbs", report.ceilings.read_gbs.best},
              {"copy_gbs", report.ceilings.copy_gbs.best},
              {"rows", nlohmann::ordered_json::array()}});
  for (const bench::KindRows& kind : report.kinds) {
    for (const bench::LayerRow& row : kind.rows) {
      out["rows"].push_back({{"kind", kind.kind},
                             {"tokens", row.tokens},
                             {"experts", row.num_experts},
                             {"weight_bytes", kind.weight_bytes},
                             {"make_seconds", kind.make_seconds},
                             {"bytes", row.bytes},
                             {"calls_per_sample", row.calls},
                             {"median_us", row.time.quantile(0.5) * 1e6},
                             {"gbs", row.gbs()},
                             {"share_of_read", row.share_of_read()},
                             {"seconds", row.time.seconds},
                             {"read_seconds", row.read_time.seconds}});
    }
  }
  return out;
}

}  // namespace

BenchLayer::BenchLayer(CLI::App& bench)
    : command_(bench.add_subcommand("layer",
                                    "One layer of each kind alone, random weights: a token and a chunk of a prefill")) {
  command_->add_option("--shape", options_.shape, "flash or pro (small: a few megabytes)")
      ->type_name("flash|pro|small")
      ->capture_default_str();
  command_
      ->add_option("--kind", options_.kind,
                   "swa (window only), csa (every 4 tokens compressed, some selected), hca (every 128), or all")
      ->type_name("swa|csa|hca|all")
      ->capture_default_str();
  command_
      ->add_option("--context", options_.context,
                   "Tokens before, in whole windows of 128; their cache entries are random")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command_->add_option("--tokens", options_.tokens, "Of the chunk")->check(CLI::Range(1, 4096))->capture_default_str();
  command_->add_option("--seconds", options_.seconds, "At least so long per row")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  add_dense_flag(*command_, dense_, "nvfp4");
  add_device_flag(*command_, options_.device);
}

void BenchLayer::run(const model::LoadOptions& load, bool is_json) {
  options_.load = load, options_.dense = dense_format(dense_, options_.dense);
  bool has_head = false;
  const auto print_kind = [&](const bench::LayerReport& report, const bench::KindRows& kind) {
    if (is_json) return;
    if (!has_head) {
      print_result(fmt::format("{}; {} of {}, after {} tokens\n{:<6} {:>7} {:>10} {:>12} {:>10} {:>8}\n",
                               ceilings_of(report), options_.kind == "all" ? "one layer of each kind" : "one layer",
                               options_.shape, report.context, "layer", "tokens", "us", "must read", "GB/s",
                               "of read"));
      has_head = true;
    }
    for (const bench::LayerRow& row : kind.rows) {
      print_result(fmt::format("{:<6} {:>7} {:>10.1f} {:>12} {:>10.2f} {:>7.0f}% {}\n", kind.kind, row.tokens,
                               row.time.quantile(0.5) * 1e6, format_bytes(static_cast<uint64_t>(row.bytes)), row.gbs(),
                               100 * row.share_of_read(), text_bar(row.share_of_read(), 20)));
    }
  };
  const bench::LayerReport report = bench::run_layer(options_, print_kind);
  if (is_json) print_result(json_of(report, options_).dump() + "\n");
}

}  // namespace tessera::app
