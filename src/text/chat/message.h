// SPDX-License-Identifier: Apache-2.0
#pragma once
// A conversation as the chat format sees it. All strings are UTF-8.
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

enum class Role { kSystem, kUser, kAssistant, kTool, kDeveloper, kLatestReminder };

// Internal classification tasks that the model knows; each has a token that takes the place of an ordinary answer.
enum class Task { kNone, kAction, kQuery, kAuthority, kDomain, kTitle, kReadUrl };

struct ToolCall {
  std::string id;         // what a tool message's tool_call_id refers to; may be empty
  std::string name;       // of the tool
  std::string arguments;  // JSON text of an object; anything else is rendered as one parameter named "arguments"
};

// Fields that a role has no use for are ignored.
struct Message {
  Role role = Role::kUser;
  std::string content;
  std::string reasoning;             // assistant: what stood before </think>
  std::vector<ToolCall> tool_calls;  // assistant
  // Assistant: the calls as the model wrote them, with the empty line before; rendered in place of tool_calls, which
  // then only give the order of results. Empty: the calls are written from tool_calls.
  std::string sampled_calls;
  std::string tool_call_id;        // tool
  std::vector<std::string> tools;  // system, developer: JSON of each function (name, description, parameters)
  std::string response_format;     // system, developer: JSON that answers must follow; empty: none
  Task task = Task::kNone;         // all but tool
  bool is_open = false;            // assistant: no end token follows, so the model continues this text
};

// "latest_reminder" and the like, as messages name them; "" for Task::kNone.
std::string_view to_string(Role role);
std::string_view to_string(Task task);

}  // namespace tessera::text
