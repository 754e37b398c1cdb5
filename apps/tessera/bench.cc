// SPDX-License-Identifier: Apache-2.0
// tessera bench ops, tessera bench layer, tessera bench model; tessera bench serve and targets lie apart
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/env.h"
#include "base/error.h"
#include "base/plot.h"
#include "base/strings.h"
#include "bench/e2e/bench_model.h"
#include "bench/ops/bench_ops.h"
#include "bench/shapes/published.h"
#include "bench_layer.h"
#include "bench_serve.h"
#include "bench_steps.h"
#include "bench_targets.h"
#include "console.h"
#include "default_model.h"
#include "device/device_choice.h"
#include "model_flags.h"
#include "ops/planner.h"
#include "record_head.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

double rate(int64_t amount, const bench::Samples& samples) {
  return static_cast<double>(amount) / samples.quantile(0.5) * 1e-9;
}

// The best of each, and below what a tenth of the measurements was.
void add_ceilings(const bench::Ceilings& ceilings, nlohmann::ordered_json& out) {
  const auto add = [&](const std::string& name, const bench::Ceiling& ceiling) {
    out[name] = ceiling.best;
    out[name + "_p10"] = ceiling.p10;
  };
  add("read_gbs", ceilings.read_gbs);
  add("copy_gbs", ceilings.copy_gbs);
  add("mma_bf16_gflops", ceilings.mma_gflops);
  add("read_one_thread_gbs", ceilings.read_one_gbs);
  add("avx512_bf16_gflops", ceilings.bf16_gflops);
  add("amx_bf16_gflops", ceilings.amx_gflops);
  out["unstable"] = ceilings.unstable();
}

nlohmann::ordered_json json_of(const bench::Report& report, const std::string& mode, const std::string& device_flag) {
  nlohmann::ordered_json out = record_head("tessera bench ops", device_flag);
  out.update({{"device", report.device}, {"threads", report.num_threads}, {"mode", mode}});
  add_ceilings(report.ceilings, out);
  out["rows"] = nlohmann::ordered_json::array();
  for (const bench::Row& row : report.rows) {
    out["rows"].push_back({{"name", row.name},
                           {"variant", row.variant},
                           {"tokens", row.tokens},
                           {"bytes", row.bytes},
                           {"flops", row.flops},
                           {"calls_per_sample", row.calls},
                           {"median_us", row.time.quantile(0.5) * 1e6},
                           {"p10_us", row.time.quantile(0.1) * 1e6},
                           {"p90_us", row.time.quantile(0.9) * 1e6},
                           {"read_p10_us", row.read_time.quantile(0.1) * 1e6},
                           {"read_median_us", row.read_time.quantile(0.5) * 1e6},
                           {"residence", row.residence == bench::Residence::kMemory ? "memory" : "cache"},
                           {"gbs", rate(row.bytes, row.time)},
                           {"gflops", rate(row.flops, row.time)},
                           {"share_of_read", row.share_of_read()},
                           {"share_of_products", row.share_of_products(report.ceilings)},
                           {"share", row.share(report.ceilings)},
                           {"is_implausible", row.is_implausible(report.ceilings)},
                           {"seconds", row.time.seconds},
                           {"read_seconds", row.read_time.seconds}});
  }
  return out;
}

double median(const std::vector<double>& values) {
  return bench::Samples{values}.quantile(0.5);
}

nlohmann::ordered_json json_of(const std::string& shape, const bench::SyntheticModel& made) {
  nlohmann::ordered_json out = {{"shape", shape},
                                {"layers", made.num_layers},
                                {"all_layers", made.all_layers},
                                {"weight_bytes", made.weight_bytes},
                                {"make_seconds", made.make_seconds},
                                {"pack_seconds", made.pack_seconds},
                                {"packed_bytes", made.packed_bytes},
                                {"peak_bytes", made.peak_bytes}};
  add_ceilings(made.ceilings, out);
  out["one_token_in_a_layer"] = nlohmann::ordered_json::array();
  for (const bench::LayerRow& row : made.layers) {
    out["one_token_in_a_layer"].push_back({{"layer", row.layer},
                                           {"compress_ratio", row.ratio},
                                           {"is_hashed", row.is_hashed},
                                           {"bytes", row.bytes},
                                           {"calls_per_sample", row.calls},
                                           {"share_of_read", row.share_of_read()},
                                           {"seconds", row.time.seconds},
                                           {"read_seconds", row.read_time.seconds}});
  }
  return out;
}

class Bench final : public Verb {
 public:
  explicit Bench(CLI::App& app) : command_(app.add_subcommand("bench", "Measure this machine")) {
    command_->require_subcommand(1);
    ops_ = command_->add_subcommand("ops",
                                    "Every op at the shapes of Flash and Pro, beside what memory and arithmetic "
                                    "allow in the same run");
    ops_->add_option("--tokens", options_.tokens, "Tokens per call, comma-separated [1,4,64,256]")->delimiter(',');
    ops_->add_option("--mode", mode_, "Inputs of linear maps [a16]")->type_name("a16|a8|a4");
    ops_->add_option("--only", options_.only, "Rows whose name contains this");
    ops_->add_option("--seconds", options_.seconds, "At least so long per row [0.5]");
    add_device_flag(*ops_, options_.device);
    layer_ = std::make_unique<BenchLayer>(*command_);
    layer_->command()->add_option("--mode", mode_, "Inputs of linear maps [a16]")->type_name("a16|a8|a4");
    model_ = command_->add_subcommand("model", "Prefill and greedy decode of one sequence, tokens per second");
    CLI::Option* directory =
        model_->add_option("--model", model_options_.directory, "Folder [the bundled tiny-v4, or TESSERA_MODEL]");
    model_
        ->add_option("--synthetic", model_options_.synthetic,
                     "Random NVFP4 weights, made in memory, in the shape of flash or pro (small: a few megabytes)")
        ->check(CLI::IsMember({"flash", "pro", "small"}))
        ->excludes(directory);
    add_dense_flag(*model_, dense_, "nvfp4")->needs("--synthetic");
    model_
        ->add_option("--layers", model_options_.num_layers, "Layers of a synthetic model [as many as fit into memory]")
        ->needs("--synthetic");
    model_
        ->add_option("--contexts", contexts_,
                     "Prompt lengths, comma-separated [512 and 4096, or the most; synthetic: 512,4096,32768]; with "
                     "--batches, --gpus or --ranks those beyond 131072 begin behind random cache entries")
        ->delimiter(',');
    model_->add_option("--decode", model_options_.decode_tokens, "Tokens made after each prompt [64]");
    model_->add_option("--repeats", model_options_.repeats, "Runs; the median is shown [5]");
    model_->add_option(
        "--step-tokens", step_tokens_,
        "Tokens of a prefill computed at once [64; synthetic: 512, and no more of a prompt is computed]");
    model_->add_option("--mode", mode_, "Inputs of linear maps; f32 without --synthetic only [a16]")
        ->type_name("f32|a16|a8|a4");
    model_
        ->add_option(
            "--batches", batches_,
            "Of a synthetic model: whole steps with so many sequences, comma-separated, instead of layers alone "
            "[with --gpus or --ranks: 1,32,128]")
        ->delimiter(',')
        ->needs("--synthetic");
    model_->add_option("--record", record_, "With --batches, --gpus or --ranks: also write all samples, as JSON")
        ->type_name("FILE.json");
    add_device_flag(*model_, model_options_.device);
    add_rank_flags(*model_, ranks_);
    model_
        ->add_flag("--only-last-rank", ranks_.only_last_rank,
                   "The last of --gpus or --ranks by itself, on one of them: its share of a step without the link, "
                   "since what others would send is what it sends")
        ->group("Ranks");
    for (CLI::App* verb : {ops_, layer_->command(), model_}) {
      verb->add_option("--threads", num_threads_, "Threads [one per processor]");
      verb->add_flag("--json", is_json_, "One JSON object, with every sample");
    }
    serve_ = std::make_unique<BenchServe>(*command_);
    targets_ = std::make_unique<BenchTargets>(*command_);
    for (CLI::App* verb : {ops_, model_}) verb->add_option("--plot", plot_, "Also draw it")->type_name("FILE.svg");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    if (serve_->command()->parsed()) return serve_->run();
    if (targets_->command()->parsed()) {
      targets_->run(ops::parse_forced(env_value("TESSERA_FORCE").value_or("")));
      return kExitOk;
    }
    const bool is_synthetic = !model_options_.synthetic.empty(), takes_f32 = model_->parsed() && !is_synthetic;
    const auto mode = ops::input_mode_from_name(mode_);
    if (!mode || (*mode == ops::InputMode::kF32 && !takes_f32)) {
      fail_usage(fmt::format("--mode: expected {}a16, a8 or a4{}, found \"{}\"", takes_f32 ? "f32, " : "",
                             is_synthetic ? " with --synthetic" : "", printable(mode_, 40)));
    }
    check("--threads", num_threads_, 0, 4096);
    const auto forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
    if (ops_->parsed()) {
      options_.mode = *mode;
      options_.num_threads = num_threads_;
      options_.forced = forced;
      for (const int64_t tokens : options_.tokens) check("--tokens", tokens, 1, 65536);
      if (!(options_.seconds >= 0 && options_.seconds <= 3600)) {
        fail(ErrorCode::kInvalidArgument, fmt::format("--seconds: expected 0 to 3600, found {}", options_.seconds));
      }
      return run_ops();
    }
    model_options_.load.precision.input = *mode;
    model_options_.load.num_threads = num_threads_;
    model_options_.load.forced = forced;
    model_options_.load.with_draft = false;
    if (layer_->command()->parsed()) {
      layer_->run(model_options_.load, is_json_);
      return kExitOk;
    }
    model_options_.dense = dense_format(dense_, model_options_.dense);
    if (model_->count("--layers") > 0) {
      const int64_t all = bench::published_config(model_options_.synthetic).num_layers;
      check("--layers", model_options_.num_layers, 1, all);
    }
    const bool has_ranks = refuse_stray_rank_flags(ranks_);
    if (ranks_.only_last_rank && !has_ranks)
      fail_usage("--only-last-rank: expected --gpus or --ranks besides, found neither");
    const bool takes_steps = has_ranks || !batches_.empty();
    if (has_ranks && !is_synthetic) fail_usage("--gpus, --ranks: expected --synthetic beside them, found none");
    if (takes_steps && !plot_.empty()) fail_usage("--plot: expected none beside --batches, --gpus and --ranks");
    if (!takes_steps && !record_.empty()) fail_usage("--record: expected --batches, --gpus or --ranks, found none");
    if (step_tokens_ == 0) step_tokens_ = is_synthetic ? 512 : 64;
    check("--step-tokens", step_tokens_, 1, 65536);
    model_options_.load.max_step_tokens = step_tokens_;
    if (contexts_.empty() && is_synthetic) contexts_ = {512, 4096, 32768};
    for (const int64_t context : contexts_) check("--contexts", context, 1, 1 << 20);
    model_options_.contexts = contexts_;
    check("--decode", model_options_.decode_tokens, 1, 1 << 20);
    check("--repeats", model_options_.repeats, 1, 1000);
    return takes_steps ? run_steps() : run_model();
  }

 private:
  static void check(const char* flag, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {} to {}, found {}", flag, least, most, value));
  }

  int run_ops() {
    warn_of_backends(device::machine_of(options_.device));
    // Opened before anything is measured.
    const std::unique_ptr<AtomicFile> plot = open_plot();
    bool has_head = false;
    const bench::Report report = bench::run_ops(options_, [&](const bench::Report& all, const bench::Row& row) {
      if (is_json_) return;
      if (!has_head) {
        print_result(
            fmt::format("{}\n{:<66} {:>12} {:>6} {:>10} {:>8} {:>9} {:>6}  of the nearer ceiling: r read, p products\n",
                        bench::ceilings_text(all), "op", "variant", "tokens", "us", "GB/s", "GFLOP/s", "share"));
        has_head = true;
      }
      const bool is_read = row.share_of_read() >= row.share_of_products(all.ceilings);
      print_result(fmt::format("{:<66} {:>12} {:>6} {:>10.1f} {:>8.2f} {:>9.1f} {:>5.0f}%{}{} {}\n", row.name,
                               row.variant, row.tokens, row.time.quantile(0.5) * 1e6, rate(row.bytes, row.time),
                               rate(row.flops, row.time), 100 * row.share(all.ceilings), is_read ? 'r' : 'p',
                               row.is_implausible(all.ceilings) ? '!' : ' ', text_bar(row.share(all.ceilings), 20)));
    });
    if (is_json_) {
      print_result(json_of(report, mode_, options_.device).dump() + "\n");
    } else {
      for (const std::string& note : bench::report_notes(report)) print_result(note + "\n");
    }
    const std::string cpu = fmt::format("{}, {} threads", device::probe_machine().cpu_name, report.num_threads);
    write_plot(plot.get(), bench::report_svg(report, report.is_on_gpu ? report.device : cpu));
    return kExitOk;
  }

  // The file of --plot, if any.
  std::unique_ptr<AtomicFile> open_plot() const {
    return plot_.empty() ? nullptr : std::make_unique<AtomicFile>(plot_);
  }
  static void write_plot(AtomicFile* plot, const std::string& picture) {
    if (plot == nullptr) return;
    plot->write(picture.data(), picture.size());
    plot->commit();
  }

  int run_steps() {
    BenchSteps steps;
    steps.options = {.shape = model_options_.synthetic,
                     .num_layers = model_options_.num_layers,
                     .seed = model_options_.seed,
                     .dense = model_options_.dense,
                     .contexts = contexts_,
                     .steps = model_options_.decode_tokens,
                     .repeats = model_options_.repeats,
                     .load = model_options_.load};
    if (!batches_.empty()) steps.options.batches = batches_;
    steps.ranks = ranks_;
    steps.model.mode = mode_, steps.model.threads = num_threads_, steps.model.device = model_options_.device;
    steps.record = record_, steps.is_json = is_json_;
    return run_bench_steps(std::move(steps));
  }

  int run_model() {
    const bool is_synthetic = !model_options_.synthetic.empty();
    if (!is_synthetic && model_options_.directory.empty()) model_options_.directory = default_model();
    warn_of_backends(device::machine_of(model_options_.device));
    const std::unique_ptr<AtomicFile> plot = open_plot();
    bench::ModelObserver observer;
    if (!is_json_) {
      observer.on_loaded = [](const bench::LoadTime& load) {
        print_result(fmt::format("{} of weights in place after {:.2f} s ({:.2f} GB/s)\n", format_bytes(load.bytes),
                                 load.seconds, static_cast<double>(load.bytes) / load.seconds * 1e-9));
      };
      observer.on_made = [&](const bench::SyntheticModel& made) { print_made(made); };
      observer.on_row = [](const bench::ModelRow& row) {
        std::string note;
        if (row.filled > 0) note = fmt::format("   (the first {} tokens' cache entries are random)", row.filled);
        print_result(fmt::format("context {:>6}   prefill {:>9.1f} tokens/s   decode {:>8.1f} tokens/s{}\n",
                                 row.context, median(row.prefill_tokens_per_second),
                                 median(row.decode_tokens_per_second), note));
      };
    }
    const bench::ModelReport report = bench::run_model(model_options_, observer);
    const device::Machine machine = device::probe_machine();
    const int threads = num_threads_ > 0 ? num_threads_ : machine.num_cores;
    if (plot) {
      const std::string model = is_synthetic ? "random weights, " + model_options_.synthetic : model_options_.directory;
      write_plot(plot.get(), bench::model_svg(report, fmt::format("{}, {}", printable(model, 200), mode_),
                                              model_options_.device == "cpu"
                                                  ? fmt::format("{}, {} threads", machine.cpu_name, threads)
                                                  : fmt::format("{} of {}", model_options_.device, machine.cpu_name)));
    }
    if (!is_json_) return kExitOk;
    nlohmann::ordered_json out = record_head("tessera bench model", model_options_.device);
    out.update(
        {{"device", model_options_.device}, {"threads", threads}, {"mode", mode_}, {"variants", report.variants}});
    if (is_synthetic) {
      out["synthetic"] = json_of(model_options_.synthetic, report.synthetic);
      out["synthetic"]["dense"] = to_string(model_options_.dense);
    }
    if (!is_synthetic) out["load"] = {{"bytes", report.load.bytes}, {"seconds", report.load.seconds}};
    out["rows"] = nlohmann::ordered_json::array();
    for (const bench::ModelRow& row : report.rows) {
      out["rows"].push_back({{"context", row.context},
                             {"tokens_with_random_cache_entries", row.filled},
                             {"prefill_tokens_per_second", row.prefill_tokens_per_second},
                             {"decode_tokens_per_second", row.decode_tokens_per_second}});
    }
    print_result(out.dump() + "\n");
    return kExitOk;
  }

  void print_made(const bench::SyntheticModel& made) const {
    print_result(fmt::format(
        "{} of {} layers of {}, random weights, {}; made in {:.1f} s, of that packing {:.1f} s ({:.1f} GB/s)\n"
        "read {}, {} with one thread\n{:<24} {:>10} {:>10} {:>8}\n",
        made.num_layers, made.all_layers, model_options_.synthetic, format_bytes(made.weight_bytes), made.make_seconds,
        made.pack_seconds, static_cast<double>(made.packed_bytes) / std::max(made.pack_seconds, 1e-9) * 1e-9,
        to_string(made.ceilings.read_gbs, 1, "GB/s"), to_string(made.ceilings.read_one_gbs, 1, "GB/s"),
        "one token in a layer", "us", "GB/s", "of read"));
    for (const bench::LayerRow& row : made.layers) {
      const double share = row.share_of_read();
      print_result(fmt::format("{:<24} {:>10.1f} {:>10.2f} {:>7.0f}% {}\n", row.description(),
                               row.time.quantile(0.5) * 1e6, rate(row.bytes, row.time), 100 * share,
                               text_bar(share, 20)));
    }
  }

  CLI::App *command_, *ops_, *model_;
  std::unique_ptr<BenchLayer> layer_;
  std::unique_ptr<BenchServe> serve_;
  std::unique_ptr<BenchTargets> targets_;
  bench::Options options_;
  bench::ModelOptions model_options_;
  RankFlags ranks_;
  std::string mode_ = "a16", dense_, plot_, record_;
  std::vector<int64_t> contexts_, batches_;
  int64_t step_tokens_ = 0;
  int num_threads_ = 0;
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_bench(CLI::App& app) {
  return std::make_unique<Bench>(app);
}

}  // namespace tessera::app
