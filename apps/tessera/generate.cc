// SPDX-License-Identifier: Apache-2.0
// tessera generate: one prompt, one answer.
#include "engine/generate.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>

#include "backends/registry.h"
#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/safetensors_writer.h"
#include "console.h"
#include "default_model.h"
#include "generate_output.h"
#include "model/load_model.h"
#include "progress_bar.h"
#include "text/chat/prompt.h"
#include "trace_printer.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxStops = 16, kMaxStopBytes = 256;
constexpr size_t kMaxPromptBytes = 64 << 20;

std::atomic<bool> g_is_interrupted{false};

// The first Ctrl-C ends generation after the current step; the second ends the program as usual.
void on_interrupt(int) {
  g_is_interrupted = true;
  std::signal(SIGINT, SIG_DFL);
}

struct Flags {
  std::string prompt, ids, model, mode = "a16", cache = "fp8", logits_path;
  bool is_raw = false, thinks = false, is_json = false, traces = false, is_quiet = false, shows_plan = false,
       allows_inexact = false;
  int64_t max_tokens = 256;
  model::SamplingParams sampling;
  std::string seed;  // empty: a new one
  std::vector<std::string> stops, logit_bias;
  int threads = 0;
};

[[noreturn]] void fail_usage(const std::string& message) {
  fail(ErrorCode::kInvalidArgument, message);
}

std::string read_standard_input() {
  std::string text(std::istreambuf_iterator<char>(std::cin), {});
  if (text.size() > kMaxPromptBytes)
    fail_usage(fmt::format("prompt: expected at most {} bytes, found {}", kMaxPromptBytes, text.size()));
  // A text file's last newline is not part of the question.
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

// "1,2,3".
std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(text.data() + begin, text.data() + end, id);
    if (error != std::errc() || stop != text.data() + end || begin == end) {
      fail_usage(fmt::format("--ids: expected numbers separated by commas, found \"{}\"",
                             printable(text.substr(begin, end - begin), 40)));
    }
    ids.push_back(id);
    begin = end + 1;
  }
  return ids;
}

uint64_t parse_seed(const std::string& text) {
  if (text.empty()) return static_cast<uint64_t>(std::random_device{}()) << 32 | std::random_device{}();
  uint64_t seed = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || stop != text.data() + text.size()) {
    fail_usage(fmt::format("--seed: expected a number from 0 to 2^64 - 1, found \"{}\"", printable(text, 40)));
  }
  return seed;
}

// "ID:BIAS" each.
std::vector<std::pair<int32_t, float>> parse_bias(const std::vector<std::string>& items) {
  std::vector<std::pair<int32_t, float>> out;
  for (const std::string& item : items) {
    const size_t colon = item.find(':');
    int32_t id = 0;
    float bias = 0;
    const char* last = item.data() + item.size();
    const bool is_split = colon != std::string::npos;
    const bool is_id = is_split && std::from_chars(item.data(), item.data() + colon, id).ptr == item.data() + colon;
    const bool is_bias =
        is_split && std::from_chars(item.data() + colon + 1, last, bias).ptr == last && colon + 1 < item.size();
    if (!is_id || !is_bias || colon == 0)
      fail_usage(fmt::format("--logit-bias: expected ID:NUMBER, found \"{}\"", printable(item, 40)));
    out.emplace_back(id, bias);
  }
  return out;
}

class Generate final : public Verb {
 public:
  explicit Generate(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  bool has_ids() const { return command_->get_option("--ids")->count() > 0; }
  void check_flags() const;
  ops::Precision precision() const;
  std::vector<int32_t> prompt_ids(const text::Tokenizer* tokenizer, const std::string& tokenizer_path) const;
  engine::SamplingOptions sampling(uint64_t seed) const;
  void write_logits(std::span<const int32_t> prompt, const engine::GenerateResult& result, std::vector<float>& rows,
                    int64_t vocab) const;
  void print_json(const GenerateOutput& output, const engine::GenerateResult& result, uint64_t seed) const;
  void print_summary(const engine::GenerateResult& result, const model::ModelFacts& facts, uint64_t seed) const;

  CLI::App* command_;
  Flags flags_;
};

Generate::Generate(CLI::App& app) : command_(app.add_subcommand("generate", "Answer one prompt")) {
  CLI::App& c = *command_;
  c.footer(R"(
Text goes to stdout as it is made, everything else to stderr.

Examples:
  tessera generate "Compute 257-7."
  echo "Spell mire." | tessera generate - --temperature 0.7 --seed 1 --json)");
  c.add_option("PROMPT", flags_.prompt, "The question, one user turn of a chat; - reads it from stdin");
  c.add_flag("--raw", flags_.is_raw,
             "PROMPT is the whole text: no chat format, no begin token; special tokens are parsed")
      ->group("Prompt");
  c.add_option("--ids", flags_.ids, "Token ids 1,2,3 instead of PROMPT")->group("Prompt");
  c.add_flag("--think", flags_.thinks, "Let the model reason first (<think>)")->group("Prompt");
  c.add_option("--model", flags_.model,
               "Folder with config.json, tokenizer.json, *.safetensors [the bundled tiny-v4, or TESSERA_MODEL]")
      ->group("Model");
  c.add_option("--mode", flags_.mode, "Inputs of linear maps: f32 (nothing rounded), a16 (BF16), a8 (E4M3), a4 (NVFP4)")
      ->capture_default_str()
      ->group("Model");
  c.add_option("--cache", flags_.cache, "Caches: fp8 (as the model was trained) or exact")
      ->capture_default_str()
      ->group("Model");
  c.add_flag("--allow-inexact", flags_.allows_inexact,
             "Round MXFP4 blocks that NVFP4 can't hold exactly, instead of refusing the model")
      ->group("Model");
  c.add_option("--threads", flags_.threads, "Threads [one per core]; results do not depend on it")->group("Model");
  c.add_option("--max-tokens", flags_.max_tokens, "Most tokens to make; 0 runs the prompt alone")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--temperature", flags_.sampling.temperature, "0 takes the likeliest token, 1 samples as the model says")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--top-p", flags_.sampling.top_p, "Sample from the likeliest tokens that together reach this")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--top-k", flags_.sampling.top_k, "Sample from this many tokens; 0: all")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--min-p", flags_.sampling.min_p, "Leave out tokens below this share of the likeliest")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--repetition-penalty", flags_.sampling.repetition_penalty, "Divide logits of seen tokens by this")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--frequency-penalty", flags_.sampling.frequency_penalty, "Take this off per time a token was seen")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--presence-penalty", flags_.sampling.presence_penalty, "Take this off once for a seen token")
      ->capture_default_str()
      ->group("Sampling");
  c.add_option("--logit-bias", flags_.logit_bias, "ID:NUMBER added to a token's logit; repeatable")
      ->allow_extra_args(false)
      ->group("Sampling");
  c.add_option("--seed", flags_.seed, "Repeat an answer exactly [a new one each time, printed]")->group("Sampling");
  c.add_option("--stop", flags_.stops, "End before this text; repeatable")->allow_extra_args(false)->group("Sampling");
  c.add_flag("--json", flags_.is_json, "Print {text, ids, finish_reason, usage, seed} instead of streaming")
      ->group("Output");
  c.add_option("--logits", flags_.logits_path,
               "Write FILE.safetensors: ids [n] and FP32 logits [n, vocab]; row i was computed from ids 0..i")
      ->group("Output");
  c.add_flag("--quiet", flags_.is_quiet, "No summary and no progress")->group("Output");
  c.add_flag("--plan", flags_.shows_plan, "Print which kernel computes each op, and why")->group("Diagnosis");
  c.add_flag("--trace-op", flags_.traces, "Print every op's range; name the first NaN or infinity and exit 7")
      ->group("Diagnosis");
}

void Generate::check_flags() const {
  const bool has_prompt = command_->get_option("PROMPT")->count() > 0;
  if (has_prompt && has_ids()) fail_usage("give PROMPT or --ids, not both");
  if (!has_prompt && !has_ids())
    fail_usage("no prompt: tessera generate \"Compute 257-7.\" (or - to read stdin, or --ids 1,2,3)");
  if (has_ids() && (flags_.is_raw || flags_.thinks)) fail_usage("--ids takes neither --raw nor --think");
  if (flags_.is_raw && flags_.thinks)
    fail_usage("--raw takes the text as it is: write <think> into it instead of --think");
  if (flags_.threads < 0 || flags_.threads > 4096)
    fail_usage(fmt::format("--threads: expected 0 to 4096, found {}", flags_.threads));
  if (flags_.stops.size() > kMaxStops)
    fail_usage(fmt::format("--stop: expected at most {}, found {}", kMaxStops, flags_.stops.size()));
  for (const std::string& stop : flags_.stops) {
    if (stop.empty() || stop.size() > kMaxStopBytes)
      fail_usage(fmt::format("--stop: expected 1 to {} bytes, found {}", kMaxStopBytes, stop.size()));
  }
  if (flags_.logits_path.empty()) return;
  const std::filesystem::path folder = std::filesystem::path(flags_.logits_path).parent_path();
  if (access(folder.empty() ? "." : folder.c_str(), W_OK) != 0 || std::filesystem::is_directory(flags_.logits_path)) {
    fail_usage(fmt::format("--logits: can't write {}", printable(flags_.logits_path)));
  }
}

ops::Precision Generate::precision() const {
  const auto input = ops::input_mode_from_name(flags_.mode);
  const auto cache = ops::cache_mode_from_name(flags_.cache);
  if (!input) fail_usage(fmt::format("--mode: expected f32, a16, a8 or a4, found \"{}\"", printable(flags_.mode, 40)));
  if (!cache) fail_usage(fmt::format("--cache: expected exact or fp8, found \"{}\"", printable(flags_.cache, 40)));
  return {*input, *cache};
}

std::vector<int32_t> Generate::prompt_ids(const text::Tokenizer* tokenizer, const std::string& tokenizer_path) const {
  if (has_ids()) return parse_ids(flags_.ids);
  const std::string text = flags_.prompt == "-" ? read_standard_input() : flags_.prompt;
  if (!is_valid_utf8(text)) fail_usage("prompt: expected UTF-8 text, found bytes that are not");
  if (text.empty()) fail_usage("prompt: expected text, found none");
  if (flags_.is_raw) return tokenizer->encode(text);
  text::check_chat_tokens(*tokenizer, tokenizer_path);
  const text::UserTurn turn{"", text, flags_.thinks ? text::Thinking::kOn : text::Thinking::kOff};
  return tokenizer->encode(text::render_user_turn(turn));
}

engine::SamplingOptions Generate::sampling(uint64_t seed) const {
  engine::SamplingOptions options{flags_.sampling, parse_bias(flags_.logit_bias)};
  options.params.seed = seed;
  return options;
}

void Generate::write_logits(std::span<const int32_t> prompt, const engine::GenerateResult& result,
                            std::vector<float>& rows, int64_t vocab) const {
  const int64_t count = static_cast<int64_t>(rows.size()) / vocab;
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), result.ids.begin(), result.ids.end());
  ids.resize(static_cast<size_t>(count));  // the last token drawn was not run
  checkpoint::write_safetensors(flags_.logits_path, {{"ids", {ids.data(), DType::kI32, {count}}},
                                                     {"logits", {rows.data(), DType::kF32, {count, vocab}}}});
}

void Generate::print_json(const GenerateOutput& output, const engine::GenerateResult& result, uint64_t seed) const {
  const int64_t made = static_cast<int64_t>(result.ids.size());
  const nlohmann::ordered_json json = {{"text", output.text()},
                                       {"ids", result.ids},
                                       {"finish_reason", std::string(engine::to_string(result.finish_reason))},
                                       {"usage",
                                        {{"prompt_tokens", result.num_prompt_tokens},
                                         {"completion_tokens", made},
                                         {"total_tokens", result.num_prompt_tokens + made}}},
                                       {"seed", seed}};
  print_result(json.dump() + "\n");
}

void Generate::print_summary(const engine::GenerateResult& result, const model::ModelFacts& facts,
                             uint64_t seed) const {
  const auto rate = [](size_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  };
  const std::string seed_text = flags_.sampling.temperature > 0 ? fmt::format(", seed {}", seed) : ", greedy";
  print_note(fmt::format("[{} prompt tokens at {:.0f}/s, {} made at {:.0f}/s, {}, {}{}]", result.num_prompt_tokens,
                         rate(static_cast<size_t>(result.num_prompt_tokens), result.times.prefill_seconds),
                         result.ids.size(), rate(result.ids.size(), result.times.decode_seconds),
                         engine::to_string(result.finish_reason), facts.precision, seed_text));
}

int Generate::run() {
  check_flags();
  const uint64_t seed = parse_seed(flags_.seed);
  model::LoadOptions load;
  load.precision = precision();
  load.num_threads = flags_.threads;
  load.allow_inexact = flags_.allows_inexact;
  load.forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
  load.bypass = model::parse_bypass(env_value("TESSERA_BYPASS").value_or(""));
  load.with_draft = false;  // one sequence without speculation has no use for it
  if (load.bypass.any()) {
    print_note("**** TESSERA_BYPASS leaves parts of the model out: this output is not the model's. Exit code 7. ****");
  }
  const std::string directory = flags_.model.empty() ? default_model() : flags_.model;
  const std::string tokenizer_path = (std::filesystem::path(directory) / "tokenizer.json").string();
  const bool has_tokenizer = !has_ids() || std::filesystem::exists(tokenizer_path);
  // config.json first: a wrong folder is reported as such, not as a missing tokenizer.
  const model::Config config = model::load_config(directory);
  std::optional<text::Tokenizer> tokenizer;
  if (has_tokenizer) tokenizer.emplace(text::Tokenizer::load(tokenizer_path));
  const text::Tokenizer* text = tokenizer ? &*tokenizer : nullptr;
  const std::vector<int32_t> prompt = prompt_ids(text, tokenizer_path);
  load.sequence_tokens =
      std::min(config.max_positions, static_cast<int64_t>(prompt.size()) + std::max<int64_t>(0, flags_.max_tokens));

  ConsoleLog log(flags_.is_quiet);
  ProgressBar progress(flags_.is_quiet);
  const model::LoadedModel loaded =
      model::load_model(directory, load, backends::all_backends(), device::probe_machine(), &log, &progress);
  if (flags_.shows_plan) {
    for (const ops::PlanLine& line : loaded.plan) {
      print_note(
          fmt::format("{:<44} {:<16} {:<14} {}{}", line.where, line.op, line.chosen, line.desc,
                      line.refusals.empty() ? "" : fmt::format(" (declined: {})", fmt::join(line.refusals, "; "))));
    }
  }
  TracePrinter trace;
  if (flags_.traces) loaded.runner->set_tracer(&trace);

  const model::ModelFacts& facts = loaded.runner->facts();
  engine::GenerateOptions options;
  options.max_tokens = flags_.max_tokens;
  options.sampling = sampling(seed);
  options.cancel = &g_is_interrupted;
  GenerateOutput output(text, {.streams_text = !flags_.is_json,
                               .keeps_logits = !flags_.logits_path.empty(),
                               .stops = flags_.stops,
                               .end_ids = facts.eos_ids});
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGPIPE, SIG_IGN);
  engine::GenerateResult result;
  try {
    result = engine::generate(*loaded.runner, prompt, options, output, &progress);
  } catch (const Error&) {
    // What the trace saw says more than the error that ended the run.
    if (trace.first_fault()) {
      print_error(fmt::format("first output that is not finite: {}", *trace.first_fault()));
      return kExitMismatch;
    }
    throw;
  }
  output.finish();
  if (!flags_.logits_path.empty()) write_logits(prompt, result, output.kept_logits(), facts.vocab_size);
  if (flags_.is_json) print_json(output, result, seed);
  if (!flags_.is_quiet && !flags_.is_json) print_summary(result, facts, seed);
  if (output.is_broken_pipe()) return kExitFailure;
  if (trace.first_fault()) {
    print_error(fmt::format("first output that is not finite: {}", *trace.first_fault()));
    return kExitMismatch;
  }
  if (load.bypass.any()) return kExitMismatch;
  return result.finish_reason == engine::FinishReason::kCancelled ? kExitCancelled : kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_generate(CLI::App& app) {
  return std::make_unique<Generate>(app);
}

}  // namespace tessera::app
