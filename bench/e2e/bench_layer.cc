// SPDX-License-Identifier: Apache-2.0
#include "bench/e2e/bench_layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "backends/registry.h"
#include "base/error.h"
#include "base/strings.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "device/device_choice.h"
#include "model/memory_fit.h"

namespace tessera::bench {

namespace {

constexpr int64_t kVocab = 1024;  // embedding and head are not measured here

std::vector<LayerKind> kinds_of(const model::Config& config, const LayerOptions& options) {
  std::vector<LayerKind> kinds;
  std::vector<std::string> names;
  for (const LayerKind& kind : kLayerKinds) {
    const bool is_there = std::find(config.compress_ratios.begin(), config.compress_ratios.end(), kind.ratio) !=
                          config.compress_ratios.end();
    if (is_there) names.push_back(kind.name);
    if (is_there && (options.kind == "all" || options.kind == kind.name)) kinds.push_back(kind);
  }
  if (kinds.empty()) {
    fail(ErrorCode::kInvalidArgument, fmt::format("kind: {} has layers of the kinds {}, found \"{}\"", options.shape,
                                                  fmt::join(names, ", "), printable(options.kind, 40)));
  }
  return kinds;
}

}  // namespace

model::Config one_layer(const model::Config& config, int64_t ratio) {
  model::Config one = config;
  one.num_layers = 1, one.num_hash_layers = 0;
  one.compress_ratios = {ratio};
  one.vocab_size = std::min(config.vocab_size, kVocab);
  return one;
}

LayerReport run_layer(const LayerOptions& options,
                      const std::function<void(const LayerReport&, const KindRows&)>& on_kind) {
  const model::Config all = published_config(options.shape);
  const device::Machine machine = device::machine_of(options.device);
  LayerReport report;
  report.is_on_gpu = machine.gpu.has_value();
  report.device = report.is_on_gpu ? printable(machine.gpu->name) : "cpu";
  report.context = options.context / 128 * 128;
  const int64_t capacity = report.context + options.tokens;
  for (const LayerKind& kind : kinds_of(all, options)) {
    const model::Config config = one_layer(all, kind.ratio);
    SyntheticWeights weights(config, options.seed, options.load.num_threads, {}, options.dense);
    const int64_t slots = model::ring_slots(config, options.tokens);
    const uint64_t work = model::Model::step_bytes(config, options.load.precision, options.tokens) +
                          static_cast<uint64_t>(LayerBench::kReadBytes);
    model::check_fit(weights.total_bytes(), model::sequence_bytes(config, options.load.precision, capacity, slots),
                     work, machine);
    KindRows& rows = report.kinds.emplace_back();
    rows.kind = kind.name, rows.weight_bytes = weights.total_bytes();
    const double begin = seconds_now();
    ops::Planner planner(backends::all_backends(), machine, options.load.forced);
    std::unique_ptr<device::Executor> executor = device::make_executor(machine, options.load.num_threads);
    weights.make_in(*executor, machine);
    model::Model model(config, planner, weights, options.load.precision, 0, options.tokens, std::move(executor), {});
    model.executor().synchronize();
    rows.make_seconds = seconds_now() - begin;
    const auto state = model.new_sequence(capacity);
    if (report.context > 0) fill_caches(*state, report.context, options.seed);
    LayerBench bench(model, config, weights, machine, options.seed);
    report.num_threads = model.executor().queue().num_threads();
    report.ceilings = bench.ceilings();
    rows.rows.push_back(bench.time(*state, 0, 1, options.seconds));
    if (options.tokens > 1) rows.rows.push_back(bench.time(*state, 0, options.tokens, options.seconds));
    if (on_kind) on_kind(report, rows);
  }
  return report;
}

}  // namespace tessera::bench
