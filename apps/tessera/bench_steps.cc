// SPDX-License-Identifier: Apache-2.0
#include "bench_steps.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/strings.h"
#include "console.h"
#include "device/device_choice.h"
#include "record_head.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

using nlohmann::ordered_json;

double ms(const bench::Samples& samples, double share) {
  return samples.quantile(share) * 1e3;
}

void print_made(const bench::StepReport& report, const BenchSteps& bench, const Ranks& ranks) {
  std::string cut;
  if (!ranks.is_alone()) {
    cut = fmt::format(", rank {} of {}{}, cut by {}{}{}", ranks.is_echo() ? ranks.world() - 1 : 0, ranks.world(),
                      ranks.is_echo() ? " by itself" : "", ranks.split().name,
                      ranks.split().keeps_all_heads ? ", all heads kept" : "",
                      ranks.split().shards_entries ? ", entries sharded" : "");
  }
  print_result(fmt::format("{} of {} layers of {}, random weights: {} on {}{}; made in {:.1f} s\n{}\n",
                           report.num_layers, report.all_layers, bench.options.shape, format_bytes(report.weight_bytes),
                           report.device, cut, report.make_seconds, fmt::join(report.variants, " ")));
}

void print_sum(const bench::SumRow& row) {
  print_result(fmt::format("sum of ranks  {:<22} {:>5} tokens {:>9}  {:>9.2f} us  ({:.2f} to {:.2f})\n", row.name,
                           row.tokens, format_bytes(static_cast<uint64_t>(row.bytes)), ms(row.time, 0.5) * 1e3,
                           ms(row.time, 0.1) * 1e3, ms(row.time, 0.9) * 1e3));
}

void print_row(const bench::StepRow& row) {
  std::string note;
  if (const std::optional<double> outside = row.outside_of_kernels()) {
    note = fmt::format("  {:.1f} % outside of kernels", *outside * 100);
  }
  if (!row.ahead.seconds.empty()) note += fmt::format(", {:.3f} ms one step ahead", ms(row.ahead, 0.5));
  // Said with the prompt alone, whose sequences those of the decode steps are.
  if (row.is_prompt && row.filled > 0) {
    note += fmt::format("  (the first {} tokens' cache entries are random)", row.filled);
  }
  print_result(fmt::format("{} {:>5} x context {:>7}  {:>10.3f} ms  ({:.3f} to {:.3f})  {:>9.1f} tokens/s{}\n",
                           row.is_prompt ? "prompt" : "decode", row.sequences, row.context, ms(row.time, 0.5),
                           ms(row.time, 0.1), ms(row.time, 0.9), row.tokens_per_second(), note));
}

void add_samples(const bench::Samples& samples, ordered_json& out) {
  out["median_us"] = samples.quantile(0.5) * 1e6;
  out["p10_us"] = samples.quantile(0.1) * 1e6;
  out["p90_us"] = samples.quantile(0.9) * 1e6;
  out["seconds"] = samples.seconds;
}

ordered_json json_of(const bench::StepReport& report, const BenchSteps& bench, const Ranks& ranks) {
  ordered_json out = record_head("tessera bench model", bench.options.device);
  out.update({{"device", report.device},
              {"ranks", ranks.world()},
              {"only_last_rank", ranks.is_echo()},
              {"split", ranks.is_alone() ? "" : ranks.split().name},
              {"keeps_all_heads", ranks.split().keeps_all_heads},
              {"mode", bench.model.mode},
              {"shape", bench.options.shape},
              {"dense", ops::to_string(bench.options.dense)},
              {"layers", report.num_layers},
              {"all_layers", report.all_layers},
              {"step_tokens", bench.options.load.max_step_tokens},
              {"weight_bytes_of_a_rank", report.weight_bytes},
              {"make_seconds", report.make_seconds},
              {"variants", report.variants},
              {"rows", ordered_json::array()},
              {"sums", ordered_json::array()}});
  for (const bench::StepRow& row : report.rows) {
    ordered_json one = {{"step", row.is_prompt ? "prompt" : "decode"},
                        {"context", row.context},
                        {"sequences", row.sequences},
                        {"tokens_with_random_cache_entries", row.filled},
                        {"tokens_per_second", row.tokens_per_second()}};
    add_samples(row.time, one);
    if (const std::optional<double> outside = row.outside_of_kernels()) {
      add_samples(row.kernels, one["kernels"]);
      one["outside_of_kernels"] = *outside;
    }
    if (!row.ahead.seconds.empty()) add_samples(row.ahead, one["one_step_ahead"]);
    out["rows"].push_back(std::move(one));
  }
  for (const bench::SumRow& row : report.sums) {
    ordered_json one = {{"what", row.name}, {"tokens", row.tokens}, {"bytes", row.bytes}};
    add_samples(row.time, one);
    out["sums"].push_back(std::move(one));
  }
  return out;
}

// Where tokens are cut over ranks the last one's entries stand for those that others choose: each has as many tokens as
// it, and sees no fewer entries than theirs.
void check_runs(const bench::StepOptions& options, int world) {
  const auto check = [&](const char* flag, int64_t value, int64_t step) {
    if (step < options.load.shard.fewest_tokens_to_cut || step % world == 0) return;
    fail_usage(
        fmt::format("{} {}: with --only-last-rank expected steps that {} ranks share evenly, found one of {} tokens",
                    flag, value, world, step));
  };
  const int64_t most = options.load.max_step_tokens;
  for (const int64_t context : options.contexts) {
    const int64_t computed = context - bench::filled_tokens(options, context);
    if (computed >= most) check("--step-tokens", most, most);
    check("--contexts", context, computed % most);
  }
  for (const int64_t batch : options.batches) check("--batches", batch, batch);
}

int measure(BenchSteps& bench, Ranks& ranks) {
  const bool is_quiet = ranks.is_follower() || bench.is_json;
  // Opened before anything is measured.
  const std::unique_ptr<AtomicFile> file =
      bench.record.empty() || ranks.is_follower() ? nullptr : std::make_unique<AtomicFile>(bench.record);
  const bench::StepOptions& options = bench.options;
  if (ranks.is_echo()) check_runs(options, ranks.world());
  const std::string made =
      fmt::format("random weights of {}, {} layers, dense {}, seed {}; contexts {}, batches {}, {} steps, {} repeats",
                  options.shape, options.num_layers, ops::to_string(options.dense), options.seed,
                  fmt::join(options.contexts, " "), fmt::join(options.batches, " "), options.steps, options.repeats);
  const int64_t most = *std::max_element(options.batches.begin(), options.batches.end());
  // Caches of several long ones are not planned for: the cut is a server's.
  const int64_t longest = *std::max_element(options.contexts.begin(), options.contexts.end()) + options.steps;
  ranks.join_made("model", model::published_model(bench::config_of(options), options.dense), made, bench.model,
                  bench.options.load, {most, longest});
  bench.options.device = bench.model.device;
  if (!ranks.is_follower()) warn_of_backends(device::machine_of(bench.model.device));
  bench.options.load.num_threads = bench.model.threads;
  bench::StepObserver observer;
  if (!is_quiet) {
    observer.on_made = [&](const bench::StepReport& report) { print_made(report, bench, ranks); };
    observer.on_sum = print_sum;
    observer.on_row = print_row;
  }
  const bench::StepReport report = bench::run_steps(bench.options, observer);
  if (ranks.is_follower()) return kExitOk;
  const std::string text = json_of(report, bench, ranks).dump() + "\n";
  if (bench.is_json) print_result(text);
  if (file == nullptr) return kExitOk;
  file->write(text.data(), text.size());
  file->commit();
  return kExitOk;
}

}  // namespace

int run_bench_steps(BenchSteps bench) {
  Ranks ranks(bench.ranks, bench.model);
  return ranks.run([&] { return measure(bench, ranks); });
}

}  // namespace tessera::app
