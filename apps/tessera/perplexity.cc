// SPDX-License-Identifier: Apache-2.0
// tessera perplexity: how well the model foretells a text.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "console.h"
#include "engine/score.h"
#include "eval_file.h"
#include "interrupt.h"
#include "model_flags.h"
#include "progress_bar.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

class Perplexity final : public Verb {
 public:
  explicit Perplexity(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  void print(const engine::TextScore& score, int64_t bytes, size_t segments, double seconds,
             const std::string& precision) const;

  CLI::App* command_;
  std::string file_;
  int64_t window_ = 512;
  bool is_json_ = false, is_quiet_ = false;
  ModelFlags model_;
};

Perplexity::Perplexity(CLI::App& app)
    : command_(app.add_subcommand("perplexity", "Measure how well the model foretells a text")) {
  CLI::App& c = *command_;
  c.footer(R"(
FILE is UTF-8 text, cut into windows that open with the begin token, each read without the others; or NAME.json with
{"segments": [[token ids], ...], "bytes": [...]}, each segment's first token given and the others scored.

Example:
  tessera perplexity book.txt --mode f32 --cache exact)");
  c.add_option("FILE", file_, "Text, or segments of token ids (.json)")->required();
  add_model_flags(c, model_);
  c.add_option("--window", window_, "Tokens of a window of text")->capture_default_str()->group("Evaluation");
  c.add_flag("--json", is_json_, "Print one JSON object")->group("Output");
  c.add_flag("--quiet", is_quiet_, "No progress")->group("Output");
}

void Perplexity::print(const engine::TextScore& score, int64_t bytes, size_t segments, double seconds,
                       const std::string& precision) const {
  const double bits_per_byte = bytes > 0 ? score.nats / std::log(2.0) / static_cast<double>(bytes) : 0;
  if (is_json_) {
    nlohmann::ordered_json out = {
        {"file", file_},      {"precision", precision},     {"perplexity", score.perplexity()},
        {"nats", score.nats}, {"tokens", score.num_tokens}, {"segments", segments}};
    if (bytes > 0) out["bytes"] = bytes, out["bits_per_byte"] = bits_per_byte;
    out["seconds"] = seconds;
    print_result(out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    return;
  }
  std::string text = fmt::format("perplexity     {:.3f} per token\n", score.perplexity());
  if (bytes > 0) text += fmt::format("bits per byte  {:.3f}\n", bits_per_byte);
  text += fmt::format("scored         {} tokens of {} segments, {}\n", score.num_tokens, segments, precision);
  print_result(text);
}

int Perplexity::run() {
  model::LoadOptions load = load_options(model_);
  const bool needs_tokenizer = is_plain_text(file_);
  const ModelFolder folder =
      open_folder(model_, needs_tokenizer ? TokenizerNeed::kRequired : TokenizerNeed::kIfPresent);
  const int64_t longest = folder.config.max_positions;
  if (window_ < 2 || window_ > longest)
    fail_usage(fmt::format("--window: expected 2 to {} tokens, found {}", longest, window_));
  const std::vector<ScoredText> texts =
      read_scored_texts(file_, folder.tokenizer ? &*folder.tokenizer : nullptr,
                        static_cast<int32_t>(folder.config.bos_id), folder.config.vocab_size, window_, longest);
  size_t total = 0;
  for (const ScoredText& text : texts) {
    load.sequence_tokens = std::max(load.sequence_tokens, static_cast<int64_t>(text.ids.size()));
    total += text.ids.size();
  }
  const model::LoadedModel loaded = load_weights(folder, model_, load, is_quiet_);

  watch_interrupt(InterruptEnd::kSecondEndsProgram);
  ProgressBar progress(is_quiet_);
  progress.begin("perplexity", total, "tokens");
  const auto start = std::chrono::steady_clock::now();
  engine::TextScore score;
  int64_t bytes = 0;
  bool knows_bytes = true;
  for (const ScoredText& text : texts) {
    const engine::TextScore part = engine::score_text(*loaded.runner, text.ids, &progress, &interrupted());
    score.nats += part.nats;
    score.num_tokens += part.num_tokens;
    bytes += text.num_bytes;
    knows_bytes = knows_bytes && (text.num_bytes > 0 || part.num_tokens == 0);
    if (interrupted()) {
      progress.end();
      fail(ErrorCode::kCancelled,
           fmt::format("stopped by Ctrl-C: {:.3f} per token so far, {} tokens", score.perplexity(), score.num_tokens));
    }
  }
  progress.end();
  print(score, knows_bytes ? bytes : 0, texts.size(),
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
        loaded.runner->facts().precision);
  return load.bypass.any() ? kExitMismatch : kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_perplexity(CLI::App& app) {
  return std::make_unique<Perplexity>(app);
}

}  // namespace tessera::app
