// SPDX-License-Identifier: Apache-2.0
// tessera eval: prompts with expected answers, counted right or wrong.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/strings.h"
#include "console.h"
#include "engine/generate.h"
#include "eval_file.h"
#include "interrupt.h"
#include "model_flags.h"
#include "progress_bar.h"
#include "text/detokenizer.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

// Collects an answer's text, and ends it where it can't become the expected one any more.
class AnswerWatcher final : public engine::GenerateObserver {
 public:
  AnswerWatcher(const text::Tokenizer& tokenizer, const std::vector<int32_t>& end_ids, const std::string& expected,
                bool ends_when_wrong)
      : detokenizer_(tokenizer, text::Detokenizer::Special::kKeep),
        end_ids_(end_ids),
        expected_(expected),
        ends_when_wrong_(ends_when_wrong) {}

  bool token(int32_t id) override {
    if (std::find(end_ids_.begin(), end_ids_.end(), id) != end_ids_.end()) return true;
    text_ += detokenizer_.push(id);
    return !ends_when_wrong_ || std::string_view(expected_).starts_with(text_);
  }
  // With U+FFFD for a UTF-8 sequence that was never finished.
  std::string finish() {
    text_ += detokenizer_.finish();
    return std::move(text_);
  }

 private:
  text::Detokenizer detokenizer_;
  const std::vector<int32_t>& end_ids_;
  const std::string& expected_;
  const bool ends_when_wrong_;
  std::string text_;
};

struct TaskCount {
  int64_t right = 0, prompts = 0;
};

struct Tally {
  std::vector<std::pair<std::string, TaskCount>> tasks;  // in the order of the file
  TaskCount all;
  int64_t num_prompt_tokens = 0, num_made_tokens = 0;
  double seconds = 0;

  void count(const std::string& task, bool is_right) {
    auto found = std::find_if(tasks.begin(), tasks.end(), [&](const auto& entry) { return entry.first == task; });
    if (found == tasks.end()) found = tasks.insert(tasks.end(), {task, {}});
    for (TaskCount* counts : {&found->second, &all}) {
      ++counts->prompts;
      counts->right += is_right;
    }
  }
};

double percent(const TaskCount& count) {
  return count.prompts == 0 ? 0 : 100.0 * static_cast<double>(count.right) / static_cast<double>(count.prompts);
}

std::string table(const Tally& tally) {
  size_t width = 4;
  for (const auto& [task, counts] : tally.tasks) width = std::max(width, printable(task, 40).size());
  std::string text = fmt::format("{:<{}}  right     of       %\n", "task", width);
  const auto row = [&](const std::string& name, const TaskCount& counts) {
    text += fmt::format("{:<{}} {:>6} {:>6} {:>7.1f}\n", name, width, counts.right, counts.prompts, percent(counts));
  };
  for (const auto& [task, counts] : tally.tasks) row(printable(task, 40), counts);
  if (tally.tasks.size() != 1 || tally.tasks[0].first != "all") row("all", tally.all);
  return text;
}

nlohmann::ordered_json to_json(const TaskCount& counts) {
  return {{"prompts", counts.prompts}, {"right", counts.right}};
}

// `count` of the items, spread evenly over the file so that every task has its share; all where 0.
std::vector<EvalItem> pick(std::vector<EvalItem> items, int64_t count) {
  if (count == 0 || count >= static_cast<int64_t>(items.size())) return items;
  std::vector<EvalItem> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back(std::move(items[static_cast<size_t>(i) * items.size() / static_cast<size_t>(count)]));
  return out;
}

class Eval final : public Verb {
 public:
  explicit Eval(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  void ask(model::Runner& runner, const text::Tokenizer& tokenizer, const EvalItem& item, Tally& tally);
  void print(const Tally& tally, const std::string& directory, const std::string& precision) const;

  CLI::App* command_;
  std::string file_, answers_path_;
  int64_t limit_ = 0, max_tokens_ = 256;
  bool is_json_ = false, is_quiet_ = false, shows_wrong_ = false;
  ModelFlags model_;
  std::optional<AtomicFile> answers_;
};

Eval::Eval(CLI::App& app) : command_(app.add_subcommand("eval", "Count right answers to a file of prompts")) {
  CLI::App& c = *command_;
  c.footer(R"(
FILE has one JSON object a line: "prompt_ids" (token ids) or "prompt" (the whole text, special tokens parsed), taken as
they are; "expected", the answer's text; "task", a name to count under. An answer is right where its text is the
expected one to the byte and the model ends it itself. Greedy.

Examples:
  tessera eval questions.jsonl --limit 50
  tessera eval questions.jsonl --mode a8 --json --answers answers.jsonl)");
  c.add_option("FILE", file_, "Prompts, JSON lines")->required();
  add_model_flags(c, model_);
  c.add_option("--limit", limit_, "Only this many prompts, spread evenly over the file; 0: all")
      ->capture_default_str()
      ->group("Evaluation");
  c.add_option("--max-tokens", max_tokens_, "Most tokens of an answer")->capture_default_str()->group("Evaluation");
  c.add_flag("--json", is_json_, "Print one JSON object with counts per task")->group("Output");
  c.add_option("--answers", answers_path_, "Write every answer: {line, task, right, finish_reason, text, ids} a line")
      ->type_name("FILE")
      ->group("Output");
  c.add_flag("--show-wrong", shows_wrong_, "Print every wrong answer beside the expected one")->group("Output");
  c.add_flag("--quiet", is_quiet_, "No summary and no progress")->group("Output");
}

void Eval::ask(model::Runner& runner, const text::Tokenizer& tokenizer, const EvalItem& item, Tally& tally) {
  const model::ModelFacts& facts = runner.facts();
  engine::GenerateOptions options;
  options.max_tokens = max_tokens_;
  options.cancel = &interrupted();
  // A wrong answer is run to its end only where somebody will read it.
  AnswerWatcher watcher(tokenizer, facts.eos_ids, item.expected, !answers_ && !shows_wrong_);
  const engine::GenerateResult result = engine::generate(runner, item.prompt_ids, options, watcher, nullptr);
  if (result.finish_reason == engine::FinishReason::kCancelled) return;
  const std::string text = watcher.finish();
  const bool is_right = result.finish_reason == engine::FinishReason::kEndOfText && text == item.expected;
  tally.count(item.task, is_right);
  tally.num_prompt_tokens += result.num_prompt_tokens;
  tally.num_made_tokens += static_cast<int64_t>(result.ids.size());
  if (shows_wrong_ && !is_right) {
    print_note(fmt::format("{}:{}: {}: expected \"{}\", found \"{}\" ({})", file_, item.line, printable(item.task, 40),
                           printable(item.expected), printable(text), engine::to_string(result.finish_reason)));
  }
  if (answers_) {
    const nlohmann::ordered_json line = {
        {"line", item.line}, {"task", item.task},
        {"right", is_right}, {"finish_reason", std::string(engine::to_string(result.finish_reason))},
        {"text", text},      {"ids", result.ids}};
    const std::string out = line.dump() + "\n";
    answers_->write(out.data(), out.size());
  }
}

void Eval::print(const Tally& tally, const std::string& directory, const std::string& precision) const {
  if (!is_json_) {
    print_result(table(tally));
    if (is_quiet_) return;
    print_note(fmt::format("[{} prompt tokens and {} made in {:.1f} s, {}, greedy]", tally.num_prompt_tokens,
                           tally.num_made_tokens, tally.seconds, precision));
    return;
  }
  nlohmann::ordered_json tasks = nlohmann::ordered_json::object();
  for (const auto& [task, counts] : tally.tasks) tasks[task] = to_json(counts);
  nlohmann::ordered_json out = {{"file", file_}, {"model", directory}, {"precision", precision}};
  out.update(to_json(tally.all));
  out["tasks"] = tasks;
  out["usage"] = {{"prompt_tokens", tally.num_prompt_tokens}, {"completion_tokens", tally.num_made_tokens}};
  out["seconds"] = tally.seconds;
  print_result(out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

int Eval::run() {
  if (limit_ < 0) fail_usage(fmt::format("--limit: expected 0 or more, found {}", limit_));
  if (max_tokens_ < 1) fail_usage(fmt::format("--max-tokens: expected 1 or more, found {}", max_tokens_));
  model::LoadOptions load = load_options(model_);
  const ModelFolder folder = open_folder(model_, TokenizerNeed::kRequired);
  const std::vector<EvalItem> items =
      pick(read_eval_file(file_, *folder.tokenizer, folder.config.vocab_size, folder.config.max_positions), limit_);
  for (const EvalItem& item : items) {
    load.sequence_tokens = std::max(load.sequence_tokens, static_cast<int64_t>(item.prompt_ids.size()) + max_tokens_);
  }
  load.sequence_tokens = std::min(load.sequence_tokens, folder.config.max_positions);
  if (!answers_path_.empty()) answers_.emplace(answers_path_);
  const model::LoadedModel loaded = load_weights(folder, model_, load, is_quiet_);

  watch_interrupt(InterruptEnd::kSecondEndsProgram);
  ProgressBar progress(is_quiet_);
  progress.begin("eval", items.size(), "prompts");
  Tally tally;
  const auto start = std::chrono::steady_clock::now();
  for (const EvalItem& item : items) {
    ask(*loaded.runner, *folder.tokenizer, item, tally);
    if (interrupted()) break;
    progress.advance(1);
  }
  progress.end();
  tally.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(tally, folder.directory, loaded.runner->facts().precision);
  if (answers_) answers_->commit();
  if (interrupted()) {
    print_error(fmt::format("stopped by Ctrl-C after {} of {} prompts", tally.all.prompts, items.size()));
    return kExitCancelled;
  }
  return load.bypass.any() ? kExitMismatch : kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_eval(CLI::App& app) {
  return std::make_unique<Eval>(app);
}

}  // namespace tessera::app
