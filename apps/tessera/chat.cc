// SPDX-License-Identifier: Apache-2.0
// tessera chat: a conversation, line by line.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>

#include "base/error.h"
#include "base/strings.h"
#include "chat_commands.h"
#include "chat_session.h"
#include "console.h"
#include "interrupt.h"
#include "line_reader.h"
#include "text/chat/prompt.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr int64_t kDefaultContext = 32768, kDefaultAnswer = 4096;

class Chat final : public Verb {
 public:
  explicit Chat(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  ChatSession::Settings settings(const std::string& directory) const;
  int64_t context_tokens(const model::Config& config) const;
  int converse(ChatSession& session, LineReader& reader);
  // A line, and those that it goes on in.
  LineReader::Outcome read_question(LineReader& reader, std::string& question) const;
  ChatStep take(const std::string& line, ChatSession& session, ChatScreen& screen) const;
  void print_stats(const engine::GenerateResult& result, const ChatSession& session, const ChatScreen& screen) const;

  CLI::App* command_;
  std::string system_, effort_ = "default", effort_table_, history_;
  bool thinks_ = false, keeps_no_history_ = false, is_quiet_ = false;
  int64_t context_ = 0;
  ModelFlags model_;
  SamplingFlags sampling_;
};

Chat::Chat(CLI::App& app) : command_(app.add_subcommand("chat", "Talk with the model")) {
  CLI::App& c = *command_;
  c.footer(R"(
Each line is a question; answers are streamed, reasoning dimmed. Ctrl-C stops an answer, Ctrl-D ends the chat. What a
question shares with the conversation so far is not computed again. Without a terminal every line of stdin is a
question, and answers go to stdout one after the other. Commands:
)" + chat_command_help() +
           R"(
Examples:
  tessera chat
  tessera chat --model DIR --think --temperature 1 --top-p 0.95 --system "Answer in one sentence.")");
  c.add_option("--system", system_, "Text before the conversation")->type_name("TEXT")->group("Chat");
  c.add_flag("--think", thinks_, "Let the model reason before it answers")->group("Chat");
  c.add_option("--effort", effort_, "How hard it thinks: default, low, high or max")
      ->capture_default_str()
      ->group("Chat");
  c.add_option("--effort-table", effort_table_,
               "Which release's meaning of the levels: preview or official [what the model's folder says]")
      ->group("Chat");
  c.add_option("--context", context_,
               fmt::format("Most tokens of the conversation [the model's, up to {}]", kDefaultContext))
      ->group("Chat");
  c.add_option("--history", history_, "Where typed lines are kept [$XDG_STATE_HOME/tessera/history]")
      ->type_name("FILE")
      ->group("Chat");
  c.add_flag("--no-history", keeps_no_history_, "Keep no typed lines")->group("Chat");
  add_model_flags(c, model_);
  sampling_.max_tokens = kDefaultAnswer;
  add_sampling_flags(c, sampling_);
  c.add_flag("--quiet", is_quiet_, "No token speed and no progress of loading")->group("Output");
}

ChatSession::Settings Chat::settings(const std::string& directory) const {
  ChatSession::Settings out;
  const auto effort = text::effort_from_name(effort_);
  if (!effort)
    fail_usage(fmt::format("--effort: expected default, low, high or max, found \"{}\"", printable(effort_, 40)));
  out.chat.effort_table = text::effort_table_of_model(directory);
  if (!effort_table_.empty()) {
    const auto table = text::effort_table_from_name(effort_table_);
    if (!table)
      fail_usage(
          fmt::format("--effort-table: expected preview or official, found \"{}\"", printable(effort_table_, 40)));
    out.chat.effort_table = *table;
  }
  text::effort_text(*effort, out.chat.effort_table);  // refuses a level that the table lacks
  out.chat.effort = *effort;
  out.chat.thinking = thinks_ ? text::Thinking::kOn : text::Thinking::kOff;
  out.sampling = sampling_;
  out.seed = choose_seed(sampling_.seed);
  return out;
}

int64_t Chat::context_tokens(const model::Config& config) const {
  if (command_->get_option("--context")->count() == 0) return std::min(config.max_positions, kDefaultContext);
  if (context_ < 1 || context_ > config.max_positions)
    fail_usage(fmt::format("--context: expected 1 to {} tokens, found {}", config.max_positions, context_));
  return context_;
}

LineReader::Outcome Chat::read_question(LineReader& reader, std::string& question) const {
  question.clear();
  std::string line;
  for (const char* prompt = "> ";; prompt = "... ") {
    const LineReader::Outcome outcome = reader.read(prompt, line);
    if (outcome != LineReader::Outcome::kLine) return outcome;
    if (!line.empty()) reader.remember(line);
    const bool goes_on = line.ends_with('\\');
    if (goes_on) line.back() = '\n';
    question += line;
    if (!goes_on) return outcome;
  }
}

void Chat::print_stats(const engine::GenerateResult& result, const ChatSession& session,
                       const ChatScreen& screen) const {
  const engine::Conversation& c = session.conversation();
  const double rate =
      result.times.decode_seconds > 0 ? static_cast<double>(result.ids.size()) / result.times.decode_seconds : 0;
  const bool is_long = result.finish_reason == engine::FinishReason::kLength;
  const char* end = result.finish_reason == engine::FinishReason::kCancelled ? ", stopped"
                    : !is_long                                               ? ""
                    : c.num_tokens() + 1 >= c.capacity() ? ", cut: the context is full (/clear, or --context)"
                                                         : ", cut at --max-tokens";
  screen.note(fmt::format("[{} tokens at {:.0f}/s; prompt {}, {} of them kept{}]", result.ids.size(), rate,
                          result.num_prompt_tokens, c.num_reused(), end));
}

ChatStep Chat::take(const std::string& line, ChatSession& session, ChatScreen& screen) const {
  engine::GenerateResult result;
  if (is_chat_command(line)) {
    const ChatStep step = run_chat_command(line, session, screen);
    if (step != ChatStep::kAnswerAgain) return step;
    result = session.retry(screen);
  } else {
    result = session.ask(line.starts_with("//") ? line.substr(1) : line, screen);
  }
  if (!is_quiet_) print_stats(result, session, screen);
  return ChatStep::kGoOn;
}

int Chat::converse(ChatSession& session, LineReader& reader) {
  ChatScreen screen;
  int exit_code = kExitOk;
  for (std::string line;;) {
    interrupted() = false;
    const LineReader::Outcome outcome = read_question(reader, line);
    if (outcome == LineReader::Outcome::kEnd) return exit_code;
    if (outcome == LineReader::Outcome::kInterrupted || line.find_first_not_of(" \t\r\n") == std::string::npos)
      continue;
    try {
      if (!is_valid_utf8(line)) fail_usage("question: expected UTF-8 text, found bytes that are not");
      interrupted() = false;
      if (take(line, session, screen) == ChatStep::kQuit) return exit_code;
    } catch (const Error& error) {
      // One bad question or file does not end the conversation.
      print_error(error.what());
      if (!isatty(STDIN_FILENO)) exit_code = kExitFailure;  // a person has read the message, a script needs the code
    }
    if (screen.is_broken()) return kExitFailure;
  }
}

int Chat::run() {
  check_stops(sampling_.stops);
  if (sampling_.max_tokens < 1)
    fail_usage(fmt::format("--max-tokens: expected 1 or more, found {}", sampling_.max_tokens));
  if (!is_valid_utf8(system_)) fail_usage("--system: expected UTF-8 text, found bytes that are not");
  model::LoadOptions load = load_options(model_);
  const ModelFolder folder = open_folder(model_, TokenizerNeed::kRequired);
  text::check_chat_tokens(*folder.tokenizer, folder.tokenizer_path);
  load.sequence_tokens = context_tokens(folder.config);
  ChatSession::Settings chosen = settings(folder.directory);
  const model::LoadedModel loaded = load_weights(folder, model_, load, is_quiet_);
  engine::SamplingOptions sampling = sampling_options(chosen.sampling, chosen.seed);
  if (const auto fault = engine::find_fault(sampling, loaded.runner->facts().vocab_size)) fail_usage(*fault);

  ChatSession session(folder, *loaded.runner, std::move(chosen), load.sequence_tokens);
  session.set_system(system_);
  const std::unique_ptr<LineReader> reader = make_line_reader(keeps_no_history_  ? ""
                                                              : history_.empty() ? default_history_path()
                                                                                 : history_);
  watch_interrupt(InterruptEnd::kNever);
  std::signal(SIGPIPE, SIG_IGN);
  const int exit_code = converse(session, *reader);
  return load.bypass.any() ? kExitMismatch : exit_code;
}

}  // namespace

std::unique_ptr<Verb> add_chat(CLI::App& app) {
  return std::make_unique<Chat>(app);
}

}  // namespace tessera::app
