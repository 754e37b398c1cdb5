// SPDX-License-Identifier: Apache-2.0
#include "text/chat/read_messages.h"

#include <fmt/format.h>

#include <algorithm>

#include <iterator>
#include <string_view>

#include "text/chat/python_json.h"

namespace tessera::text {

namespace {

constexpr Role kRoles[] = {Role::kSystem, Role::kUser,      Role::kAssistant,
                           Role::kTool,   Role::kDeveloper, Role::kLatestReminder};
constexpr Task kTasks[] = {Task::kAction, Task::kQuery, Task::kAuthority, Task::kDomain, Task::kTitle, Task::kReadUrl};

// One of the values, by its name.
template <class Value, size_t kCount>
Value read_name(const JsonCursor& field, const Value (&values)[kCount]) {
  std::string expected;
  for (const Value value : values) {
    if (field.value().kind() == Json::Kind::kString && field.string() == to_string(value)) return value;
    expected += fmt::format("{}\"{}\"", expected.empty() ? "" : ", ", to_string(value));
  }
  field.fail_expected(expected);
}

std::string read_part(const JsonCursor& part, bool takes_any_type) {
  const JsonCursor type = part.at("type");
  if (type.string() == "text") return part.at("text").string();
  if (!takes_any_type) type.fail_expected("\"text\"");
  return fmt::format("[Unsupported {}]", type.string());
}

std::string read_content(const JsonCursor& message, Role role) {
  const bool may_miss = role == Role::kSystem || role == Role::kAssistant;
  if (may_miss && !message.find("content")) return "";
  const JsonCursor content = message.at("content");
  if (content.value().kind() == Json::Kind::kString) return content.string();
  if (content.value().kind() != Json::Kind::kArray) content.fail_expected("a string or an array of parts");
  std::string text, separator;
  for (const JsonCursor& part : content.elements()) {
    text += separator + read_part(part, role == Role::kTool);
    separator = "\n\n";
  }
  return text;
}

// An optional string; null counts as absent.
std::string read_text(const JsonCursor& object, std::string_view key) {
  const auto field = object.find(key);
  return field ? field->string() : "";
}

bool read_flag(const JsonCursor& object, std::string_view key) {
  const auto field = object.find(key);
  return field && field->boolean();
}

// {"type": "function", "function": {...}}: the inner object. The type may be left out.
JsonCursor read_function(const JsonCursor& item) {
  const auto type = item.find("type");
  if (type && type->string() != "function") type->fail_expected("\"function\"");
  const JsonCursor function = item.at("function");
  const JsonCursor name = function.at("name");
  if (name.string().empty()) name.fail_expected("a name");
  return function;
}

std::vector<ToolCall> read_tool_calls(const JsonCursor& message) {
  std::vector<ToolCall> calls;
  const auto list = message.find("tool_calls");
  if (!list) return calls;
  for (const JsonCursor& item : list->elements()) {
    const JsonCursor function = read_function(item);
    std::string id = read_text(item, "id");
    if (id.empty()) id = read_text(function, "id");
    calls.push_back({std::move(id), function.at("name").string(), function.at("arguments").string()});
  }
  return calls;
}

// "object", or a list of types that holds it.
bool names_object(const JsonCursor& type) {
  if (type.value().kind() != Json::Kind::kArray) {
    return type.value().kind() == Json::Kind::kString && type.string() == "object";
  }
  const std::vector<JsonCursor> types = type.elements();
  return std::any_of(types.begin(), types.end(), [](const JsonCursor& each) {
    return each.value().kind() == Json::Kind::kString && each.string() == "object";
  });
}

// What is sure to be wrong in a schema of parameters; schemas know many more words.
void check_parameters(const JsonCursor& parameters) {
  if (const auto type = parameters.find("type"); type && !names_object(*type)) type->fail_expected("\"object\"");
  if (const auto properties = parameters.find("properties")) {
    for (const auto& [name, schema] : properties->members()) {
      const Json::Kind kind = schema.value().kind();
      if (kind != Json::Kind::kObject && kind != Json::Kind::kBool) schema.fail_expected("a schema (an object)");
    }
  }
  if (const auto required = parameters.find("required")) {
    for (const JsonCursor& name : required->elements()) name.string();
  }
}

Message read_message(const JsonCursor& item) {
  Message message;
  message.role = read_name(item.at("role"), kRoles);
  message.content = read_content(item, message.role);
  if (const auto task = item.find("task"); task && message.role != Role::kTool) message.task = read_name(*task, kTasks);
  switch (message.role) {
    case Role::kAssistant:
      message.reasoning = read_text(item, "reasoning_content");
      message.tool_calls = read_tool_calls(item);
      message.is_open = read_flag(item, "prefix") || read_flag(item, "wo_eos");
      break;
    case Role::kTool:
      message.tool_call_id = read_text(item, "tool_call_id");
      break;
    case Role::kDeveloper:
      if (message.content.empty()) item.at("content").fail_expected("text");
      [[fallthrough]];
    case Role::kSystem:
      if (const auto tools = item.find("tools")) message.tools = read_tools(*tools);
      if (const auto format = item.find("response_format")) {
        // An empty object asks for nothing.
        if (!format->members().empty()) message.response_format = python_json(format->value());
      }
      break;
    case Role::kUser:
    case Role::kLatestReminder:
      break;
  }
  return message;
}

}  // namespace

std::vector<std::string> read_tools(const JsonCursor& tools) {
  std::vector<std::string> texts;
  for (const JsonCursor& item : tools.elements()) {
    const JsonCursor function = read_function(item);
    if (const auto description = function.find("description")) description->string();
    if (const auto parameters = function.find("parameters")) check_parameters(*parameters);
    texts.push_back(python_json(function.value()));
  }
  return texts;
}

std::vector<Message> read_messages(const JsonCursor& messages, const std::optional<JsonCursor>& tools) {
  std::vector<Message> out;
  for (const JsonCursor& item : messages.elements()) out.push_back(read_message(item));
  if (out.empty()) messages.fail_expected("at least one message");
  if (!tools) return out;
  std::vector<std::string> texts = read_tools(*tools);
  if (texts.empty()) return out;
  if (out.front().role != Role::kSystem) {
    Message leading;
    leading.role = Role::kSystem;
    out.insert(out.begin(), std::move(leading));
  }
  std::move(texts.begin(), texts.end(), std::back_inserter(out.front().tools));
  return out;
}

}  // namespace tessera::text
