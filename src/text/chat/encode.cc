// SPDX-License-Identifier: Apache-2.0
#include "text/chat/encode.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "text/chat/markers.h"
#include "text/chat/tool_text.h"

namespace tessera::text {

namespace {

// A part of a user turn: text, or a tool's result.
struct Block {
  const Message* message;
  bool is_result() const { return message->role == Role::kTool; }
};

// What is rendered as one message. A user turn may come of several messages.
struct Turn {
  Role role;
  const Message* message;     // the first of a user turn
  std::vector<Block> blocks;  // user turns
  Task task = Task::kNone;
  bool is_user() const { return role == Role::kUser || role == Role::kDeveloper; }
};

using Turns = std::vector<Turn>;

Turns merge_user_turns(std::span<const Message> messages) {
  Turns turns;
  for (const Message& message : messages) {
    const bool is_tool = message.role == Role::kTool;
    if (!is_tool && message.role != Role::kUser) {
      turns.push_back({message.role, &message, {}, message.task});
      continue;
    }
    // A turn with a task takes results but no more text.
    const bool joins =
        !turns.empty() && turns.back().role == Role::kUser && (is_tool || turns.back().task == Task::kNone);
    if (!joins) turns.push_back({Role::kUser, &message, {}, is_tool ? Task::kNone : message.task});
    turns.back().blocks.push_back({&message});
  }
  return turns;
}

// Results come in the order of the last calls; text blocks stay where they are, unknown ids count as the first call.
void sort_results(Turns& turns) {
  std::unordered_map<std::string_view, size_t> call_order;
  const auto place = [&](const Block& block) {
    const auto found = call_order.find(block.message->tool_call_id);
    return found == call_order.end() ? 0 : found->second;
  };
  for (Turn& turn : turns) {
    if (turn.role == Role::kAssistant && !turn.message->tool_calls.empty()) {
      call_order.clear();
      size_t call_idx = 0;
      for (const ToolCall& call : turn.message->tool_calls) {
        if (!call.id.empty()) call_order[call.id] = call_idx;
        ++call_idx;
      }
    }
    std::vector<Block> results;
    std::copy_if(turn.blocks.begin(), turn.blocks.end(), std::back_inserter(results),
                 [](const Block& block) { return block.is_result(); });
    std::stable_sort(results.begin(), results.end(),
                     [&](const Block& a, const Block& b) { return place(a) < place(b); });
    size_t next = 0;
    for (Block& block : turn.blocks) {
      if (block.is_result()) block = results[next++];
    }
  }
}

// Index of the last user or developer turn; -1 without one.
ptrdiff_t last_user_idx(const Turns& turns) {
  const auto last = std::find_if(turns.rbegin(), turns.rend(), [](const Turn& turn) { return turn.is_user(); });
  return turns.rend() - last - 1;
}

class Renderer {
 public:
  Renderer(const Turns& turns, bool is_thinking, bool drops)
      : turns_(turns), is_thinking_(is_thinking), drops_(drops), last_user_(last_user_idx(turns)) {}

  std::string render(std::string_view effort) {
    out_ = kBosToken;
    if (is_thinking_ && !turns_.empty()) out_ += effort;
    for (size_t i = 0; i < turns_.size(); ++i) {
      render_turn(i);
      render_transition(i);
    }
    return std::move(out_);
  }

 private:
  void render_turn(size_t turn_idx) {
    const Turn& turn = turns_[turn_idx];
    switch (turn.role) {
      case Role::kDeveloper:
        out_ += kUserToken;
        [[fallthrough]];
      case Role::kSystem:
        out_ += turn.message->content;
        render_extras(*turn.message);
        break;
      case Role::kUser:
      case Role::kTool:  // merged into user turns
        render_user(turn);
        break;
      case Role::kAssistant:
        render_assistant(turn_idx);
        break;
      case Role::kLatestReminder:
        out_ += kLatestReminderToken;
        out_ += turn.message->content;
        break;
    }
  }

  void render_extras(const Message& message) {
    if (!message.tools.empty()) {
      out_ += "\n\n";
      append_tools_block(out_, message.tools);
    }
    if (!message.response_format.empty()) {
      out_ += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";
      out_ += message.response_format;
    }
  }

  void render_user(const Turn& turn) {
    std::string_view separator = kUserToken;
    for (const Block& block : turn.blocks) {
      out_ += separator;
      if (block.is_result()) out_ += "<tool_result>";
      out_ += block.message->content;
      if (block.is_result()) out_ += "</tool_result>";
      separator = "\n\n";
    }
  }

  void render_assistant(size_t turn_idx) {
    const Message& message = *turns_[turn_idx].message;
    const bool answers_task = turn_idx > 0 && turns_[turn_idx - 1].task != Task::kNone;
    if (is_thinking_ && !answers_task && keeps_reasoning(static_cast<ptrdiff_t>(turn_idx), last_user_ + 1)) {
      out_ += message.reasoning;
      out_ += kEndThinkToken;
    }
    out_ += message.content;
    if (!message.sampled_calls.empty()) {
      out_ += message.sampled_calls;
    } else if (!message.tool_calls.empty()) {
      out_ += "\n\n";
      append_tool_calls(out_, message.tool_calls);
    }
    if (!message.is_open) out_ += kEosToken;
  }

  // What follows a turn that an assistant, a reminder or nothing comes after.
  void render_transition(size_t turn_idx) {
    const Turn& turn = turns_[turn_idx];
    if (turn_idx + 1 < turns_.size()) {
      const Role next = turns_[turn_idx + 1].role;
      if (next != Role::kAssistant && next != Role::kLatestReminder) return;
    }
    const bool is_action = turn.task == Task::kAction;
    if (is_action || (turn.task == Task::kNone && turn.is_user())) {
      out_ += kAssistantToken;
      const bool thinks = is_thinking_ && (is_action || keeps_reasoning(static_cast<ptrdiff_t>(turn_idx), last_user_));
      out_ += thinks ? kThinkToken : kEndThinkToken;
    }
    if (turn.task != Task::kNone) out_ += fmt::format("<\uFF5C{}\uFF5C>", to_string(turn.task));
  }

  bool keeps_reasoning(ptrdiff_t turn_idx, ptrdiff_t first_kept) const { return !drops_ || turn_idx >= first_kept; }

  const Turns& turns_;
  bool is_thinking_, drops_;
  ptrdiff_t last_user_;
  std::string out_;
};

[[noreturn]] void fail_message(size_t message_idx, std::string_view field, std::string_view expected,
                               std::string_view found) {
  fail(ErrorCode::kInvalidArgument,
       fmt::format("messages[{}].{}: expected {}, found {}", message_idx, field, expected, found));
}

void check_utf8(size_t message_idx, std::string_view field, std::string_view text) {
  if (is_valid_utf8(text)) return;
  fail_message(message_idx, field, "UTF-8", fmt::format("\"{}\"", printable(text, 60)));
}

void check_message(size_t message_idx, const Message& message) {
  check_utf8(message_idx, "content", message.content);
  check_utf8(message_idx, "reasoning_content", message.reasoning);
  check_utf8(message_idx, "response_format", message.response_format);
  check_utf8(message_idx, "sampled_calls", message.sampled_calls);
  for (size_t i = 0; i < message.tools.size(); ++i)
    check_utf8(message_idx, fmt::format("tools[{}]", i), message.tools[i]);
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    check_utf8(message_idx, fmt::format("tool_calls[{}].function.name", i), message.tool_calls[i].name);
    check_utf8(message_idx, fmt::format("tool_calls[{}].function.arguments", i), message.tool_calls[i].arguments);
  }
  if (message.role == Role::kDeveloper && message.content.empty())
    fail_message(message_idx, "content", "text in a developer message", "none");
}

}  // namespace

std::string_view to_string(Role role) {
  static constexpr std::string_view kNames[] = {"system", "user", "assistant", "tool", "developer", "latest_reminder"};
  return kNames[static_cast<size_t>(role)];
}

std::string_view to_string(Task task) {
  static constexpr std::string_view kNames[] = {"", "action", "query", "authority", "domain", "title", "read_url"};
  return kNames[static_cast<size_t>(task)];
}

Prompt render_chat(std::span<const Message> messages, const ChatOptions& options) {
  for (size_t i = 0; i < messages.size(); ++i) check_message(i, messages[i]);
  const bool is_thinking = options.thinking == Thinking::kOn;
  const std::string_view effort = is_thinking ? effort_text(options.effort, options.effort_table) : "";

  Turns turns = merge_user_turns(messages);
  sort_results(turns);
  const bool has_tools =
      std::any_of(messages.begin(), messages.end(), [](const Message& message) { return !message.tools.empty(); });
  const bool drops = options.drops_old_reasoning && !has_tools;
  if (is_thinking && drops) {
    // Old reasoning is left out by the renderer, old developer messages are not even there for their neighbours.
    const auto current = turns.begin() + std::max<ptrdiff_t>(last_user_idx(turns), 0);
    turns.erase(std::remove_if(turns.begin(), current, [](const Turn& turn) { return turn.role == Role::kDeveloper; }),
                current);
  }
  Prompt prompt;
  prompt.text = Renderer(turns, is_thinking, drops).render(effort);
  prompt.starts_in_reasoning = prompt.text.ends_with(kThinkToken);
  return prompt;
}

void check_answerable(std::span<const Message> messages) {
  if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: expected at least one, found none");
  const Message& last = messages.back();
  const bool asks = last.role == Role::kUser || last.role == Role::kDeveloper || last.role == Role::kTool;
  const bool continues = last.role == Role::kAssistant && last.is_open;
  if (!asks && !continues && last.task == Task::kNone) {
    fail_message(messages.size() - 1, "role",
                 "user, developer, tool or an assistant text to continue as the last message", to_string(last.role));
  }
}

}  // namespace tessera::text
