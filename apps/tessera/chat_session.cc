// SPDX-License-Identifier: Apache-2.0
#include "chat_session.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "interrupt.h"
#include "progress_bar.h"
#include "text/chat/answer_parser.h"
#include "text/chat/read_messages.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"
#include "usage.h"

namespace tessera::app {

namespace {

using text::AnswerEvent;
using text::Message;
using text::Role;

constexpr uint64_t kMaxFileBytes = 256 << 20;

Message make_message(Role role, const std::string& content) {
  Message message;
  message.role = role;
  message.content = content;
  return message;
}

// Tokens -> text -> stop strings -> reasoning and content -> the screen.
class AnswerStream final : public engine::GenerateObserver {
 public:
  AnswerStream(const text::Tokenizer& tokenizer, const std::vector<int32_t>& end_ids, std::vector<std::string> stops,
               bool starts_in_reasoning, ChatScreen& screen)
      : detokenizer_(tokenizer, text::Detokenizer::Special::kKeep),
        stops_(std::move(stops)),
        parser_(starts_in_reasoning),
        end_ids_(end_ids),
        screen_(screen) {}

  bool token(int32_t id) override {
    if (std::find(end_ids_.begin(), end_ids_.end(), id) != end_ids_.end()) return true;
    show(parser_.push(stops_.push(detokenizer_.push(id))));
    return !stops_.has_matched() && !screen_.is_broken();
  }

  Message finish(text::Ending ending) {
    show(parser_.push(stops_.push(detokenizer_.finish())));
    show(parser_.push(stops_.finish()));
    show(parser_.finish(ending));
    screen_.end_answer();
    Message message = make_message(Role::kAssistant, parser_.answer().content);
    message.reasoning = parser_.answer().reasoning;
    for (const text::ParsedCall& call : parser_.answer().calls)
      message.tool_calls.push_back({"", call.name, call.arguments});
    return message;
  }

 private:
  void show(const std::vector<AnswerEvent>& events) {
    for (const AnswerEvent& event : events) {
      switch (event.kind) {
        case AnswerEvent::Kind::kReasoning:
          screen_.reasoning(event.text);
          break;
        case AnswerEvent::Kind::kContent:
        case AnswerEvent::Kind::kArguments:
          screen_.content(event.text);
          break;
        case AnswerEvent::Kind::kCallBegin:
          screen_.content("\n[calls " + event.text + " ");
          break;
        case AnswerEvent::Kind::kCallEnd:
          screen_.content("]\n");
          break;
      }
    }
  }

  text::Detokenizer detokenizer_;
  text::StopMatcher stops_;
  text::AnswerParser parser_;
  const std::vector<int32_t>& end_ids_;
  ChatScreen& screen_;
};

nlohmann::ordered_json to_json(const Message& message) {
  nlohmann::ordered_json out = {{"role", std::string(text::to_string(message.role))}, {"content", message.content}};
  if (!message.reasoning.empty()) out["reasoning_content"] = message.reasoning;
  if (!message.tool_call_id.empty()) out["tool_call_id"] = message.tool_call_id;
  for (const text::ToolCall& call : message.tool_calls) {
    out["tool_calls"].push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return out;
}

}  // namespace

ChatSession::ChatSession(const ModelFolder& folder, model::Runner& runner, Settings settings, int64_t context)
    : folder_(folder), runner_(runner), settings_(std::move(settings)), conversation_(runner, context) {}

engine::GenerateResult ChatSession::answer(ChatScreen& screen) {
  const text::Prompt prompt = text::render_chat(messages_, settings_.chat);
  const std::vector<int32_t> ids = folder_.tokenizer->encode(prompt.text);
  engine::GenerateOptions options;
  options.max_tokens = settings_.sampling.max_tokens;
  options.sampling = sampling_options(settings_.sampling, settings_.seed + num_answers_);
  options.cancel = &interrupted();
  AnswerStream stream(*folder_.tokenizer, runner_.facts().eos_ids, settings_.sampling.stops, prompt.starts_in_reasoning,
                      screen);
  ProgressBar progress(false);
  const engine::GenerateResult result = conversation_.answer(ids, options, stream, &progress);
  ++num_answers_;
  const bool is_ended = result.finish_reason == engine::FinishReason::kEndOfText;
  Message message = stream.finish(is_ended ? text::Ending::kEndToken : text::Ending::kCutOff);
  if (!result.ids.empty()) messages_.push_back(std::move(message));
  return result;
}

engine::GenerateResult ChatSession::ask(const std::string& question, ChatScreen& screen) {
  const std::vector<Message> before = messages_;
  messages_.push_back(make_message(Role::kUser, question));
  try {
    const engine::GenerateResult result = answer(screen);
    if (result.ids.empty()) messages_ = before;
    return result;
  } catch (...) {
    messages_ = before;
    throw;
  }
}

engine::GenerateResult ChatSession::retry(ChatScreen& screen) {
  std::vector<Message> before = messages_;
  while (!messages_.empty() && messages_.back().role == Role::kAssistant) messages_.pop_back();
  if (messages_.empty() || messages_.back().role == Role::kSystem) {
    messages_ = std::move(before);
    fail_usage("no question to answer again");
  }
  try {
    const engine::GenerateResult result = answer(screen);
    if (result.ids.empty()) messages_ = std::move(before);
    return result;
  } catch (...) {
    messages_ = std::move(before);
    throw;
  }
}

bool ChatSession::undo() {
  const auto last =
      std::find_if(messages_.rbegin(), messages_.rend(), [](const Message& m) { return m.role == Role::kUser; });
  if (last == messages_.rend()) return false;
  messages_.erase(std::prev(last.base()), messages_.end());
  return true;
}

void ChatSession::clear() {
  const std::string kept = system();
  messages_.clear();
  set_system(kept);
  conversation_.clear();
}

std::string ChatSession::system() const {
  return !messages_.empty() && messages_[0].role == Role::kSystem ? messages_[0].content : "";
}

void ChatSession::set_system(const std::string& text) {
  if (!messages_.empty() && messages_[0].role == Role::kSystem) messages_.erase(messages_.begin());
  if (!text.empty()) messages_.insert(messages_.begin(), make_message(Role::kSystem, text));
}

void ChatSession::save(const std::string& path) const {
  nlohmann::ordered_json out = {{"messages", nlohmann::ordered_json::array()}};
  for (const Message& message : messages_) out["messages"].push_back(to_json(message));
  const std::string text = out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void ChatSession::load(const std::string& path) {
  const Json json = Json::parse_python(read_file(path, kMaxFileBytes), path);
  std::vector<Message> messages = text::read_messages(JsonCursor(json, path).at("messages"));
  for (const Message& message : messages) {
    if (!message.tools.empty() || !message.response_format.empty())
      fail(ErrorCode::kUnsupported, path + ": field messages: expected no tools and no response format, found some");
  }
  messages_ = std::move(messages);
}

}  // namespace tessera::app
