// SPDX-License-Identifier: Apache-2.0
// tessera generate: one prompt, one answer.
#include "engine/generate.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "checkpoint/safetensors_writer.h"
#include "console.h"
#include "generate_output.h"
#include "interrupt.h"
#include "model_flags.h"
#include "progress_bar.h"
#include "ranks.h"
#include "sampling_flags.h"
#include "server/api_error.h"
#include "server/grammar_constraint.h"
#include "text/chat/prompt.h"
#include "trace_printer.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

struct Flags {
  std::string prompt, ids, logits_path, schema_path, pattern;
  bool is_raw = false, thinks = false, is_json = false, traces = false, is_quiet = false, shows_plan = false;
  ModelFlags model;
  RankFlags ranks;
  SamplingFlags sampling;
};

// "1,2,3".
std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (const std::string_view item : split(text, ',')) {
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(item.data(), item.data() + item.size(), id);
    if (error != std::errc() || stop != item.data() + item.size()) {
      fail_usage(fmt::format("--ids: expected numbers separated by commas, found \"{}\"", printable(item, 40)));
    }
    ids.push_back(id);
  }
  return ids;
}

class Generate final : public Verb {
 public:
  explicit Generate(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  bool is_greedy() const { return !(flags_.sampling.params.temperature > 0); }
  bool has_ids() const { return command_->get_option("--ids")->count() > 0; }
  void check_flags() const;
  int answer(Ranks& ranks) const;
  int follow(Ranks& ranks) const;
  std::shared_ptr<const engine::ConstraintSource> constraint(const ModelFolder& folder) const;
  void check_logits_path(const std::string& model_folder) const;
  void print_plan(const model::LoadedModel& loaded) const;
  std::vector<int32_t> prompt_ids(const text::Tokenizer* tokenizer, const std::string& tokenizer_path) const;
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
  echo "Spell mire." | tessera generate - --temperature 0.7 --seed 1 --json

Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or file, 4 not enough memory or disk, 5 device or a lost rank,
7 not finite or bypassed, 130 stopped.)");
  c.add_option("PROMPT", flags_.prompt,
               "The question, one user turn of a chat; - reads it from stdin, less a last newline");
  c.add_flag("--raw", flags_.is_raw,
             "PROMPT is the whole text: no chat format, no begin token; special tokens are parsed")
      ->group("Prompt");
  c.add_option("--ids", flags_.ids, "Token ids 1,2,3 instead of PROMPT")->type_name("IDS")->group("Prompt");
  c.add_flag("--think", flags_.thinks, "Let the model reason first (<think>)")->group("Prompt");
  add_model_flags(c, flags_.model);
  add_rank_flags(c, flags_.ranks);
  add_sampling_flags(c, flags_.sampling);
  c.add_option("--json-schema", flags_.schema_path, "The answer is JSON that fits the JSON Schema in FILE")
      ->type_name("FILE")
      ->check(not_empty("a file"))
      ->group("Form");
  c.add_option("--regex", flags_.pattern, "The whole answer fits the regular expression")
      ->type_name("R")
      ->check(not_empty("a regular expression"))
      ->group("Form");
  c.add_flag("--json", flags_.is_json, "Print {text, ids, finish_reason, usage, seed} instead of streaming")
      ->group("Output");
  c.add_option(
       "--logits", flags_.logits_path,
       "Write FILE, of safetensors: ids [n] and FP32 logits [n, vocab]; row i comes from ids 0..i; the last token "
       "made has none")
      ->type_name("FILE")
      ->check(not_empty("a file"))
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
  if (!flags_.schema_path.empty() && !flags_.pattern.empty()) fail_usage("give --json-schema or --regex, not both");
  check_stops(flags_.sampling.stops);
}

// What --json-schema or --regex holds the answer to; nothing without them.
std::shared_ptr<const engine::ConstraintSource> Generate::constraint(const ModelFolder& folder) const {
  const bool is_regex = !flags_.pattern.empty();
  if (!is_regex && flags_.schema_path.empty()) return {};
  if (!folder.tokenizer) fail_usage("--json-schema and --regex need the model's tokenizer.json, which is not there");
  server::ChatRequest request;
  request.format.kind = is_regex ? server::OutputFormat::Kind::kRegex : server::OutputFormat::Kind::kJsonSchema;
  request.format.field = is_regex ? "--regex" : "--json-schema";
  request.format.definition = is_regex ? flags_.pattern : read_file(flags_.schema_path, server::kMaxSchemaBytes);
  const std::vector<int32_t> end_ids(folder.config.eos_ids.begin(), folder.config.eos_ids.end());
  try {
    text::GrammarCompiler grammars(*folder.tokenizer, static_cast<int32_t>(folder.config.vocab_size), end_ids);
    return server::make_constraint(request, flags_.thinks, grammars, *folder.tokenizer, end_ids,
                                   server::Compiling::kAny);
  } catch (const server::RequestError& error) {
    if (is_regex) fail_usage(error.what());
    throw;
  }
}

// Before anything is computed: the file can be made, and no file of the model is in its place.
void Generate::check_logits_path(const std::string& model_folder) const {
  if (flags_.logits_path.empty()) return;
  try {
    const AtomicFile probe(flags_.logits_path);
  } catch (const Error& error) {
    fail_usage(fmt::format("--logits: {}", error.what()));
  }
  const std::filesystem::path folder = std::filesystem::path(flags_.logits_path).parent_path();
  std::error_code error;
  if (std::filesystem::equivalent(folder.empty() ? "." : folder, model_folder, error)) {
    fail_usage(
        fmt::format("--logits: expected a path outside the model's folder, found {}", printable(flags_.logits_path)));
  }
}

std::vector<int32_t> Generate::prompt_ids(const text::Tokenizer* tokenizer, const std::string& tokenizer_path) const {
  if (has_ids()) return parse_ids(flags_.ids);
  std::string text = flags_.prompt == "-" ? read_standard_input() : flags_.prompt;
  // A text file's last newline is not part of the question.
  if (flags_.prompt == "-" && !flags_.is_raw && text.ends_with('\n')) text.pop_back();
  if (!is_valid_utf8(text)) fail_usage("prompt: expected UTF-8 text, found bytes that are not");
  if (text.empty()) fail_usage("prompt: expected text, found none");
  if (flags_.is_raw) return tokenizer->encode(text);
  text::check_chat_tokens(*tokenizer, tokenizer_path);
  const text::UserTurn turn{"", text, flags_.thinks ? text::Thinking::kOn : text::Thinking::kOff};
  return tokenizer->encode(text::render_user_turn(turn));
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
                                       {"seed", is_greedy() ? nlohmann::json() : nlohmann::json(seed)}};
  print_result(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void Generate::print_summary(const engine::GenerateResult& result, const model::ModelFacts& facts,
                             uint64_t seed) const {
  const auto rate = [](size_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  };
  const std::string seed_text = is_greedy() ? ", greedy" : fmt::format(", seed {}", seed);
  print_note(fmt::format("[{} prompt tokens at {:.0f}/s, {} made at {:.0f}/s, {}, {}{}]", result.num_prompt_tokens,
                         rate(static_cast<size_t>(result.num_prompt_tokens), result.times.prefill_seconds),
                         result.ids.size(), rate(result.ids.size(), result.times.decode_seconds),
                         engine::to_string(result.finish_reason), facts.precision, seed_text));
}

void Generate::print_plan(const model::LoadedModel& loaded) const {
  for (const ops::PlanLine& line : loaded.plan) {
    print_note(
        fmt::format("{:<44} {:<16} {:<14} {}{}", line.where, line.op, line.chosen, line.desc,
                    line.refusals.empty() ? "" : fmt::format(" (declined: {})", fmt::join(line.refusals, "; "))));
  }
}

// Runs the same sequence again, which comes out the same, with every op looked at.
void find_fault(model::Runner& runner, std::span<const int32_t> prompt, const engine::GenerateOptions& options,
                TracePrinter& trace) {
  GenerateOutput nothing(nullptr, {.streams_text = false, .keeps_logits = false, .stops = {}, .end_ids = {}});
  runner.set_tracer(&trace);
  try {
    engine::generate(runner, prompt, options, nothing, nullptr);
  } catch (const Error&) {
    // The error that is being explained.
  }
}

int Generate::run() {
  Ranks ranks(flags_.ranks, flags_.model);
  return ranks.run([&] {
    check_flags();
    return ranks.is_follower() ? follow(ranks) : answer(ranks);
  });
}

int Generate::follow(Ranks& ranks) const {
  model::LoadOptions load = load_options(flags_.model);
  const ModelFolder folder = open_folder(flags_.model, TokenizerNeed::kIfPresent);
  ranks.join("generate", folder, flags_.model, load, {});  // rank 0 has the prompt
  const model::LoadedModel loaded = load_weights(folder, flags_.model, load, true);
  ranks.agree_on(loaded);
  ranks.follow(*loaded.runner);
  return kExitOk;
}

int Generate::answer(Ranks& ranks) const {
  const uint64_t seed = choose_seed(flags_.sampling.seed);
  model::LoadOptions load = load_options(flags_.model);
  const ModelFolder folder =
      open_folder(flags_.model, has_ids() ? TokenizerNeed::kIfPresent : TokenizerNeed::kRequired);
  const text::Tokenizer* text = folder.tokenizer ? &*folder.tokenizer : nullptr;
  if (text == nullptr && !flags_.sampling.stops.empty()) {
    fail_usage(fmt::format("--stop needs {}, which is not there", printable(folder.tokenizer_path)));
  }
  check_logits_path(folder.directory);
  const std::vector<int32_t> prompt = prompt_ids(text, folder.tokenizer_path);
  const std::shared_ptr<const engine::ConstraintSource> form = constraint(folder);
  const int64_t longest = folder.config.max_positions;
  load.sequence_tokens = std::min(
      longest, static_cast<int64_t>(prompt.size()) + std::clamp<int64_t>(flags_.sampling.max_tokens, 0, longest));
  if (!flags_.logits_path.empty()) load.extra_bytes = sizeof(float) * load.sequence_tokens * folder.config.vocab_size;

  ranks.join("generate", folder, flags_.model, load, {1, load.sequence_tokens});
  const model::LoadedModel loaded = load_weights(folder, flags_.model, load, flags_.is_quiet);
  ranks.agree_on(loaded);
  model::Runner& runner = ranks.lead(*loaded.runner);
  ProgressBar progress(flags_.is_quiet);
  if (flags_.shows_plan) print_plan(loaded);
  TracePrinter trace(flags_.traces);
  if (flags_.traces) runner.set_tracer(&trace);

  const model::ModelFacts& facts = runner.facts();
  engine::GenerateOptions options;
  options.max_tokens = flags_.sampling.max_tokens;
  options.sampling = sampling_options(flags_.sampling, seed);
  options.constraint = form.get();
  options.cancel = &interrupted();
  options.shows_decode = flags_.is_json;
  GenerateOutput output(text, {.streams_text = !flags_.is_json,
                               .keeps_logits = !flags_.logits_path.empty(),
                               .stops = flags_.sampling.stops,
                               .end_ids = facts.eos_ids});
  watch_interrupt(InterruptEnd::kSecondEndsProgram);
  ranks.leave_interrupts_to_verb();
  std::signal(SIGPIPE, SIG_IGN);
  engine::GenerateResult result;
  try {
    result = engine::generate(runner, prompt, options, output, &progress);
  } catch (const Error& error) {
    output.finish();
    if (error.code() != ErrorCode::kNotFinite) throw;
    if (!trace.first_fault()) find_fault(runner, prompt, options, trace);
    if (!trace.first_fault()) throw;
    print_error(fmt::format("first output that is not finite: {}", *trace.first_fault()));
    return kExitMismatch;
  }
  output.finish();
  const bool is_cancelled = result.finish_reason == engine::FinishReason::kCancelled;
  if (!flags_.logits_path.empty() && !is_cancelled)
    write_logits(prompt, result, output.kept_logits(), facts.vocab_size);
  if (flags_.is_json) print_json(output, result, seed);
  if (!flags_.is_quiet) note_idle_flags(*command_, flags_.sampling);
  if (!flags_.is_quiet && !flags_.is_json) print_summary(result, facts, seed);
  if (trace.first_fault()) {
    print_error(fmt::format("first output that is not finite: {}", *trace.first_fault()));
    return kExitMismatch;
  }
  if (load.bypass.any()) return kExitMismatch;
  return is_cancelled ? kExitCancelled : kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_generate(CLI::App& app) {
  return std::make_unique<Generate>(app);
}

}  // namespace tessera::app
