// SPDX-License-Identifier: Apache-2.0
#include "server/anthropic/messages_request.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "server/request_fields.h"
#include "text/chat/python_json.h"

namespace tessera::server::anthropic {

namespace {

Schema content_schema(std::vector<Tagged> blocks) {
  return either({string(kMaxTextLength), array(tagged("type", std::move(blocks)), kMaxParts)});
}

Schema message_schema() {
  const Tagged text = {"text", {required("text", string(kMaxTextLength))}};
  const Tagged result = {"tool_result",
                         {required("tool_use_id", string(kMaxIdLength)),
                          optional("content", result_content().or_null()), optional("is_error", boolean().or_null())}};
  const Tagged thinking = {
      "thinking",
      {required("thinking", string(kMaxTextLength)), optional("signature", string(kMaxTextLength).or_null())}};
  const Tagged hidden = {"redacted_thinking", {optional("data", string(kMaxTextLength).or_null())}};
  const Tagged use = {"tool_use",
                      {required("id", string(kMaxIdLength)), required("name", string(kMaxIdLength, 1)),
                       required("input", any_object(kMaxTextLength))}};
  return tagged("role", {{"user", {required("content", content_schema({text, result}))}},
                         {"assistant", {required("content", content_schema({text, thinking, hidden, use}))}}});
}

// What both endpoints take.
std::vector<Field> prompt_fields() {
  const Schema tool =
      tagged("type",
             {{"custom",
               {required("name", name(kMaxNameLength)), optional("description", string(kMaxTextLength).or_null()),
                required("input_schema", parameters_document())}}},
             "custom");
  const Field disables_parallel = optional("disable_parallel_tool_use", boolean().or_null());
  const Schema choice = tagged("type", {{"auto", {disables_parallel}},
                                        {"any", {disables_parallel}},
                                        {"none", {}},
                                        {"tool", {required("name", name(kMaxNameLength)), disables_parallel}}});
  const Schema thinking =
      tagged("type",
             {{"enabled", {required("budget_tokens", integer(1024, kMaxTokens))}}, {"adaptive", {}}, {"disabled", {}}});
  const Schema format = tagged("type", {{"json_schema", {required("schema", schema_document())}}});
  const Schema output = object({optional("effort", one_of({"low", "medium", "high", "xhigh", "max"}).or_null()),
                                optional("format", format.or_null())});
  return {required("model", string(kMaxNameLength, 1)),
          required("messages", array(message_schema(), kMaxMessages, 1)),
          optional("system", text_content({"text"}).or_null()),
          optional("tools", array(tool, kMaxTools).or_null()),
          optional("tool_choice", choice.or_null()),
          optional("thinking", thinking.or_null()),
          optional("output_config", output.or_null()),
          never("container"),
          never("mcp_servers")};
}

Schema make_messages_schema() {
  std::vector<Field> fields = prompt_fields();
  append(fields, {
                     required("max_tokens", integer(0, kMaxTokens)),
                     optional("temperature", number(0, 1).or_null()),
                     optional("top_p", number(0, 1).or_null()),
                     optional("top_k", integer(0, 1 << 30).or_null()),
                     optional("stop_sequences", array(text_of(kMaxStopBytes, 1), kMaxStops).or_null()),
                     optional("stream", boolean().or_null()),
                 });
  return object(std::move(fields));
}

// Blocks of one message, in the order in which the chat format has their kinds.
void read_user(const Json& content, std::vector<text::Message>& messages) {
  if (content.kind() == Json::Kind::kString || content.array().empty()) {
    messages.emplace_back().content = content.string();
    return;
  }
  for (const Json& block : content.array()) {
    text::Message& message = messages.emplace_back();
    if (block.find("type")->string() == "text") {
      message.content = block.find("text")->string();
      continue;
    }
    message.role = text::Role::kTool;
    message.tool_call_id = block.find("tool_use_id")->string();
    if (const Json* result = given(block, "content")) message.content = read_result(*result);
    // The chat format has no flag for it; the text often says it, but need not.
    if (flag_or(block, "is_error")) message.content = "[error] " + message.content;
  }
}

void read_assistant(const Json& content, std::vector<text::Message>& messages) {
  // Consecutive messages of the assistant are one, up to its calls.
  const bool continues =
      !messages.empty() && messages.back().role == text::Role::kAssistant && messages.back().tool_calls.empty();
  if (!continues) messages.emplace_back().role = text::Role::kAssistant;
  text::Message& message = messages.back();
  if (content.kind() == Json::Kind::kString) {
    message.content += content.string();
    return;
  }
  for (const Json& block : content.array()) {
    const std::string& type = block.find("type")->string();
    if (type == "text") {
      message.content += block.find("text")->string();
    } else if (type == "thinking") {
      message.reasoning += block.find("thinking")->string();
    } else if (type == "tool_use") {
      message.tool_calls.push_back(
          {block.find("id")->string(), block.find("name")->string(), text::python_json(*block.find("input"))});
    }
  }
}

void read_messages(const Json& body, ChatRequest& request) {
  if (const Json* system = given(body, "system")) {
    request.messages.emplace_back().role = text::Role::kSystem;
    request.messages.back().content = read_text(*system);
  }
  for (const Json& message : body.find("messages")->array()) {
    const bool is_user = message.find("role")->string() == "user";
    (is_user ? read_user : read_assistant)(*message.find("content"), request.messages);
  }
  // The last message of the assistant is text to go on with; calls are not.
  text::Message& last = request.messages.back();
  last.is_open = last.role == text::Role::kAssistant && last.tool_calls.empty();
}

std::vector<std::string> read_tools(const Json& body, const ServedModel& model, ToolPolicy& policy) {
  std::vector<std::string> lines;
  if (const Json* tools = given(body, "tools")) {
    for (const Json& tool : tools->array()) lines.push_back(read_flat_tool(tool, "input_schema", policy));
  }
  if (const Json* choice = given(body, "tool_choice")) {
    const std::string& type = choice->find("type")->string();
    policy.allows_parallel = !flag_or(*choice, "disable_parallel_tool_use");
    if (type == "none") policy.choice = ToolChoice::kNone;
    if (type == "any") policy.choice = ToolChoice::kRequired;
    if (type == "tool") {
      policy.choice = ToolChoice::kNamed;
      policy.named = choice->find("name")->string();
    }
  }
  check_tools(policy, model, "tool_choice");
  return lines;
}

void read_thinking(const Json& body, const ServedModel& model, ChatRequest& request) {
  request.chat.effort_table = model.effort_table;
  const Json* output = given(body, "output_config");
  if (output != nullptr && given(*output, "effort") != nullptr) {
    set_effort(request.chat, given(*output, "effort")->string(), model);
  }
  // As in Anthropic's API: thinking only where it is asked for; the effort alone does not.
  const Json* thinking = given(body, "thinking");
  const bool is_on = thinking != nullptr && thinking->find("type")->string() != "disabled";
  request.chat.thinking = is_on ? text::Thinking::kOn : text::Thinking::kOff;
  if (is_on && given(*thinking, "budget_tokens") != nullptr) {
    request.thinking_budget = integer_of(*given(*thinking, "budget_tokens"));
    // As in Anthropic's API: reasoning counts as part of the answer, and must leave room for the rest. Between calls of
    // tools it may be a budget of several answers.
    const std::optional<int64_t> most = request.options.max_tokens;
    const bool has_tools = given(body, "tools") != nullptr && !given(body, "tools")->array().empty();
    if (!has_tools && most && *request.thinking_budget >= *most) {
      fail_field(kConflict, "thinking.budget_tokens", fmt::format("fewer than max_tokens, {}", *most),
                 std::to_string(*request.thinking_budget));
    }
  }
}

std::string read_format(const Json& body, const ServedModel& model, OutputFormat& format) {
  const Json* output = given(body, "output_config");
  const Json* field = output == nullptr ? nullptr : given(*output, "format");
  if (field == nullptr) return "";
  require_grammars(model, "output_config.format.type", "no format: this server has no grammars",
                   field->find("type")->string());
  format = {OutputFormat::Kind::kJsonSchema, text::python_json(*field->find("schema")), "output_config.format.schema"};
  return text::python_json(*field);
}

ChatRequest read(std::string_view text, const Schema& schema, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, schema);
  ChatRequest request;
  request.options = read_generation(body, schema, model, {"max_tokens"});
  const Json* stops = &schema == &messages_schema() ? given(body, "stop_sequences") : nullptr;
  if (stops != nullptr) {
    for (const Json& stop : stops->array()) request.options.stops.push_back(stop.string());
  }
  request.options.streams_usage = true;
  read_messages(body, request);
  read_thinking(body, model, request);
  std::string response_format = read_format(body, model, request.format);
  arrange_system(request.messages, read_tools(body, model, request.tools), std::move(response_format));
  check_answerable(request.messages, "messages");
  return request;
}

}  // namespace

const Schema& messages_schema() {
  static const Schema kSchema = make_messages_schema();
  return kSchema;
}

const Schema& count_tokens_schema() {
  static const Schema kSchema = object(prompt_fields());
  return kSchema;
}

Reply<ChatRequest> parse_messages(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read(body, messages_schema(), model); });
}

Reply<ChatRequest> parse_count_tokens(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read(body, count_tokens_schema(), model); });
}

}  // namespace tessera::server::anthropic
