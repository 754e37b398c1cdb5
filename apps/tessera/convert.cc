// SPDX-License-Identifier: Apache-2.0
// tessera convert: any checkpoint to NVFP4.
#include "convert/convert.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "console.h"
#include "convert/report.h"
#include "progress_bar.h"
#include "verb.h"

namespace tessera::app {

namespace {

std::atomic<bool> g_is_interrupted{false};

// The first Ctrl-C stops after the current rows, so that the conversion can be resumed; the second ends the program.
void on_interrupt(int) {
  g_is_interrupted = true;
  std::signal(SIGINT, SIG_DFL);
}

class Convert final : public Verb {
 public:
  explicit Convert(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  convert::Options options() const;
  void print_summary(const convert::Result& result, double seconds) const;

  CLI::App* command_;
  std::string in_, out_, families_ = "experts", method_ = "amax";
  uint64_t max_shard_bytes_ = convert::Options{}.max_shard_bytes;
  bool resumes_ = false, forces_ = false, is_trial_ = false, allows_inexact_ = false, is_quiet_ = false,
       is_json_ = false;
  int threads_ = 0;
};

Convert::Convert(CLI::App& app) : command_(app.add_subcommand("convert", "Convert a checkpoint to NVFP4")) {
  CLI::App& c = *command_;
  c.footer(R"(
MXFP4 becomes NVFP4 exactly, NVFP4 keeps its bits; BF16, F32 and FP8 are rounded. What --families does not name keeps
its format. OUT gets ModelOpt's layout with official names, config.json, the tokenizer, hashes.json, and a report as
conversion_report.json and .svg; the report's text goes to stdout. OUT has no config.json before all is written.

Families: experts, shared (experts), attention, compressor, indexer, head, or all.

Examples:
  tessera convert DeepSeek-V4-Flash DeepSeek-V4-Flash-NVFP4
  tessera convert my-bf16-model out --families experts,shared,attention --method four-over-six
  tessera convert IN OUT --trial           # how much would be lost? writes nothing
  tessera convert IN OUT --resume          # after an interruption)");
  c.add_option("IN", in_, "Folder with config.json and *.safetensors")->required();
  c.add_option("OUT", out_, "Folder to write; must be empty or not exist")->required();
  c.add_option("--families", families_, "Linear maps that become NVFP4, separated by commas")->capture_default_str();
  c.add_option("--method", method_,
               "Rounding: amax (a block's largest value becomes 6) or four-over-six (6 or 4, what is nearer)")
      ->capture_default_str()
      ->check(CLI::IsMember({"amax", "four-over-six"}));
  c.add_option("--max-shard-size", max_shard_bytes_, "Most bytes of a file: 5GB, 500MiB, ... [5GB]")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t{1000}, uint64_t{1'000'000'000'000'000}));
  c.add_flag("--allow-inexact", allows_inexact_,
             "Round MXFP4 blocks that NVFP4 can't hold exactly; the report counts them");
  auto* resume = c.add_flag("--resume", resumes_, "Continue what was interrupted in OUT; gives the same bytes");
  c.add_flag("--force", forces_, "Replace the checkpoint in OUT, once the new one is whole")->excludes(resume);
  c.add_flag("--trial", is_trial_, "Read and measure everything, write nothing");
  c.add_option("--threads", threads_, "Threads [one per processor]; the output does not depend on it")
      ->check(CLI::Range(0, 4096));
  c.add_flag("--json", is_json_, "Print the report as JSON instead of text");
  c.add_flag("--quiet", is_quiet_, "No report, unless --json asks for it, no summary and no progress");
}

convert::Options Convert::options() const {
  convert::Options options;
  options.families = convert::parse_families(families_);
  options.rule = method_ == "amax" ? numeric::Nvfp4WeightRule::kAmax : numeric::Nvfp4WeightRule::kFourOverSix;
  options.max_shard_bytes = max_shard_bytes_;
  options.allow_inexact = allows_inexact_;
  options.existing = resumes_  ? convert::Existing::kResume
                     : forces_ ? convert::Existing::kReplace
                               : convert::Existing::kRefuse;
  options.is_trial = is_trial_;
  options.num_threads = threads_;
  options.version = TESSERA_VERSION;
  return options;
}

void Convert::print_summary(const convert::Result& result, double seconds) const {
  const std::string resumed =
      result.num_resumed_shards > 0 ? fmt::format(" ({} were there already)", result.num_resumed_shards) : "";
  const uint64_t rate = seconds > 0 ? static_cast<uint64_t>(static_cast<double>(result.source_bytes) / seconds) : 0;
  print_note(fmt::format("{} {} to {} in {} shards{}, {:.1f} s, {}/s", is_trial_ ? "measured" : "converted",
                         format_bytes(result.source_bytes), format_bytes(result.output_bytes), result.num_shards,
                         resumed, seconds, format_bytes(rate)));
}

int Convert::run() {
  const convert::Options chosen = options();
  ConsoleLog log(is_quiet_);
  ProgressBar progress(is_quiet_);
  std::signal(SIGINT, on_interrupt);
  const auto start = std::chrono::steady_clock::now();
  convert::Result result;
  try {
    result = convert::convert(in_, out_, chosen, &log, &progress, &g_is_interrupted);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    const bool can_resume = !is_trial_ && convert::is_unfinished(out_);
    print_error(!can_resume ? "stopped; nothing was kept"
                : forces_   ? "stopped; the same command with --resume instead of --force continues"
                            : "stopped; the same command with --resume continues");
    return kExitCancelled;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (is_json_ || !is_quiet_) {
    print_result(is_json_ ? convert::report_json(result.families) : convert::report_text(result.families));
  }
  if (!is_quiet_) print_summary(result, seconds);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_convert(CLI::App& app) {
  return std::make_unique<Convert>(app);
}

}  // namespace tessera::app
