// SPDX-License-Identifier: Apache-2.0
#include "chat_commands.h"

#include <fmt/format.h>

#include <charconv>
#include <iterator>

#include "base/strings.h"
#include "usage.h"

namespace tessera::app {

namespace {

using Handler = ChatStep (*)(const std::string& argument, ChatSession& session, const ChatScreen& screen);

struct Command {
  const char *name, *arguments, *meaning;
  Handler run;
};

template <class T>
T read_number(const std::string& command, const std::string& text, T min, T max) {
  T value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = !text.empty() && error == std::errc() && stop == text.data() + text.size();
  if (!is_number || !(value >= min && value <= max))
    fail_usage(
        fmt::format("{}: expected a number from {} to {}, found \"{}\"", command, min, max, printable(text, 40)));
  return value;
}

ChatStep help(const std::string&, ChatSession&, const ChatScreen& screen) {
  screen.note(chat_command_help() +
              "A line that ends in \\ goes on in the next; // begins a question with a slash.\n"
              "Ctrl-C stops an answer, Ctrl-D on an empty line ends the chat.");
  return ChatStep::kGoOn;
}

ChatStep clear(const std::string&, ChatSession& session, const ChatScreen& screen) {
  session.clear();
  screen.note("[conversation forgotten]");
  return ChatStep::kGoOn;
}

ChatStep set_system(const std::string& text, ChatSession& session, const ChatScreen& screen) {
  if (!text.empty()) session.set_system(text == "-" ? "" : text);
  const std::string now = session.system();
  screen.note(now.empty() ? "[no system text]" : fmt::format("[system: {}]", printable(now)));
  return ChatStep::kGoOn;
}

ChatStep think(const std::string& level, ChatSession& session, const ChatScreen& screen) {
  text::ChatOptions& chat = session.settings().chat;
  if (level == "off") {
    chat.thinking = text::Thinking::kOff;
  } else if (!level.empty()) {
    const auto effort = text::effort_from_name(level == "on" ? "default" : level);
    if (!effort)
      fail_usage(fmt::format("/think: expected on, off, low, high or max, found \"{}\"", printable(level, 40)));
    text::effort_text(*effort, chat.effort_table);  // refuses a level that this model's table lacks
    chat.effort = *effort;
    chat.thinking = text::Thinking::kOn;
  }
  screen.note(chat.thinking == text::Thinking::kOff
                  ? "[thinking off]"
                  : fmt::format("[thinking on, effort {}]", text::to_string(chat.effort)));
  return ChatStep::kGoOn;
}

ChatStep save(const std::string& path, ChatSession& session, const ChatScreen& screen) {
  if (path.empty()) fail_usage("/save: expected a file");
  if (session.num_messages() == 0) fail_usage("/save: expected a conversation, found no message yet");
  session.save(path);
  screen.note(fmt::format("[{} messages saved to {}]", session.num_messages(), printable(path)));
  return ChatStep::kGoOn;
}

ChatStep load(const std::string& path, ChatSession& session, const ChatScreen& screen) {
  if (path.empty()) fail_usage("/load: expected a file");
  session.load(path);
  screen.note(fmt::format("[{} messages loaded from {}]", session.num_messages(), printable(path)));
  return ChatStep::kGoOn;
}

ChatStep set_temperature(const std::string& text, ChatSession& session, const ChatScreen& screen) {
  float& temperature = session.settings().sampling.params.temperature;
  if (!text.empty()) temperature = read_number("/temp", text, 0.0f, 100.0f);
  screen.note(fmt::format("[temperature {}]", temperature));
  return ChatStep::kGoOn;
}

ChatStep set_max_tokens(const std::string& text, ChatSession& session, const ChatScreen& screen) {
  int64_t& tokens = session.settings().sampling.max_tokens;
  if (!text.empty()) tokens = read_number<int64_t>("/max", text, 1, int64_t{1} << 40);
  screen.note(fmt::format("[at most {} tokens an answer]", tokens));
  return ChatStep::kGoOn;
}

ChatStep show_tokens(const std::string&, ChatSession& session, const ChatScreen& screen) {
  const engine::Conversation& c = session.conversation();
  screen.note(fmt::format("[{} messages; {} of {} tokens held, {} of the last prompt were not run again]",
                          session.num_messages(), c.num_tokens(), c.capacity(), c.num_reused()));
  return ChatStep::kGoOn;
}

ChatStep retry(const std::string&, ChatSession&, const ChatScreen&) {
  return ChatStep::kAnswerAgain;
}

ChatStep undo(const std::string&, ChatSession& session, const ChatScreen& screen) {
  screen.note(session.undo() ? "[last question taken back]" : "[nothing to take back]");
  return ChatStep::kGoOn;
}

ChatStep quit(const std::string&, ChatSession&, const ChatScreen&) {
  return ChatStep::kQuit;
}

constexpr Command kCommands[] = {
    {"/help", "", "this list", help},
    {"/clear", "", "forget the conversation, keep the system text", clear},
    {"/system", "[TEXT]", "set the system text, or show it; - removes it", set_system},
    {"/think", "[on|off|low|high|max]", "let the model reason before it answers", think},
    {"/temp", "[NUMBER]", "temperature; 0 takes the likeliest token", set_temperature},
    {"/max", "[NUMBER]", "most tokens of an answer", set_max_tokens},
    {"/retry", "", "answer the last question again", retry},
    {"/undo", "", "take back the last question and its answer", undo},
    {"/save", "FILE", "write the conversation as JSON", save},
    {"/load", "FILE", "go on with a saved conversation", load},
    {"/tokens", "", "how much of the context is used", show_tokens},
    {"/quit", "", "end the chat", quit},
};

}  // namespace

bool is_chat_command(const std::string& line) {
  return line.starts_with('/') && !line.starts_with("//");
}

ChatStep run_chat_command(const std::string& line, ChatSession& session, const ChatScreen& screen) {
  const size_t space = std::min(line.find(' '), line.size());
  const std::string name = line.substr(0, space);
  const size_t begin = std::min(line.find_first_not_of(' ', space), line.size());
  const std::string argument = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
  for (const Command& command : kCommands) {
    if (name != command.name && !(name == "/exit" && command.run == quit)) continue;
    if (*command.arguments == '\0' && !argument.empty())
      fail_usage(fmt::format("{}: expected no argument, found \"{}\"", name, printable(argument, 40)));
    return command.run(argument, session, screen);
  }
  fail_usage(fmt::format("no command {} (try /help)", printable(name, 40)));
}

std::string chat_command_help() {
  std::string text;
  for (const Command& command : kCommands) {
    text += fmt::format("  {:<30} {}\n", fmt::format("{} {}", command.name, command.arguments), command.meaning);
  }
  return text;
}

}  // namespace tessera::app
