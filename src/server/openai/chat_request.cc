// SPDX-License-Identifier: Apache-2.0
#include "server/openai/chat_request.h"

#include <map>
#include <utility>

#include "server/request_fields.h"
#include "text/chat/python_json.h"

namespace tessera::server::openai {

namespace {

Schema call_schema() {
  return tagged("type",
                {{"function",
                  {optional("id", string(kMaxIdLength).or_null()),
                   required("function", object({required("name", string(kMaxIdLength, 1)),
                                                required("arguments", string(kMaxTextLength))}))}}},
                "function");
}

// Fields that the chat format has for its own purposes, and those of other message kinds.
void add_refused(std::vector<Field>& fields) {
  for (const std::string_view name : {"task", "tools", "response_format", "wo_eos", "function_call", "audio"}) {
    fields.push_back(never(name));
  }
}

Schema message_schema() {
  std::vector<Field> system = {required("content", text_content({"text"}))};
  std::vector<Field> user = system;
  std::vector<Field> assistant = {
      optional("content", text_content({"text"}).or_null()),
      optional("reasoning_content", string(kMaxTextLength).or_null()),
      optional("reasoning", string(kMaxTextLength).or_null()),
      optional("tool_calls", array(call_schema(), kMaxTools).or_null()),
      optional("prefix", boolean().or_null()),
      only_empty("refusal"),
  };
  std::vector<Field> tool = {
      required("content", result_content()),  // parts that are not text: the model is told their type
      required("tool_call_id", string(kMaxIdLength)),
  };
  for (std::vector<Field>* fields : {&system, &user, &assistant, &tool}) add_refused(*fields);
  return tagged("role",
                {{"system", system}, {"developer", system}, {"user", user}, {"assistant", assistant}, {"tool", tool}});
}

Schema response_format_schema() {
  const Schema named =
      object({required("name", name(64)), required("schema", schema_document()),
              optional("description", string(kMaxTextLength).or_null()), optional("strict", boolean().or_null())});
  return tagged("type", {{"text", {}},
                         {"json_object", {}},
                         {"json_schema", {required("json_schema", named)}},
                         {"regex", {required("pattern", string(kMaxPatternLength, 1))}}});
}

Schema tool_choice_schema() {
  return either(
      {one_of({"auto", "none", "required"}),
       tagged("type", {{"function", {required("function", object({required("name", name(kMaxNameLength))}))}}})});
}

Schema make_chat_schema() {
  std::vector<Field> fields = generation_fields();
  append(fields, thinking_fields());
  append(fields, {
                     required("messages", messages_schema()),
                     optional("tools", tools_schema().or_null()),
                     optional("tool_choice", tool_choice_schema().or_null()),
                     optional("parallel_tool_calls", boolean().or_null()),
                     optional("response_format", response_format_schema().or_null()),
                     optional("max_tokens", integer(1, kMaxTokens).or_null()),
                     optional("max_completion_tokens", integer(1, kMaxTokens).or_null()),
                     optional("logprobs", boolean().or_null()),
                     optional("top_logprobs", integer(0, kMaxTopLogprobs).or_null()),
                     only_boolean("echo", false),
                     only_boolean("add_generation_prompt", true),
                     only_boolean("continue_final_message", false),
                     only_one_of("verbosity", {"medium"}),
                     never("functions"),
                     never("function_call"),
                     never("audio"),
                     never("prediction"),
                     never("web_search_options"),
                     never("documents"),
                     never("chat_template"),
                     optional("modalities", array(one_of({"text"}), 1).or_null()),
                 });
  return object(std::move(fields));
}

text::Message read_message(const Json& item) {
  static const std::map<std::string_view, text::Role> kRoles = {{"system", text::Role::kSystem},
                                                                {"developer", text::Role::kSystem},
                                                                {"user", text::Role::kUser},
                                                                {"assistant", text::Role::kAssistant},
                                                                {"tool", text::Role::kTool}};
  text::Message message;
  message.role = kRoles.at(item.find("role")->string());
  if (message.role == text::Role::kTool) {
    message.tool_call_id = item.find("tool_call_id")->string();
    message.content = read_result(*item.find("content"));
    return message;
  }
  if (const Json* content = given(item, "content")) message.content = read_text(*content);
  if (message.role != text::Role::kAssistant) return message;
  message.reasoning = text_or(item, "reasoning_content");
  if (message.reasoning.empty()) message.reasoning = text_or(item, "reasoning");
  message.is_open = flag_or(item, "prefix");
  if (const Json* calls = given(item, "tool_calls")) {
    for (const Json& call : calls->array()) {
      const Json& function = *call.find("function");
      message.tool_calls.push_back(
          {text_or(call, "id"), function.find("name")->string(), function.find("arguments")->string()});
    }
  }
  return message;
}

void read_format(const Json& body, const ServedModel& model, OutputFormat& format, std::string& response_format) {
  const Json* field = given(body, "response_format");
  if (field == nullptr) return;
  const std::string& type = field->find("type")->string();
  if (type == "text") return;
  require_grammars(model, "response_format.type", "text: this server has no grammars", type);
  if (type == "regex") {
    format = {OutputFormat::Kind::kRegex, field->find("pattern")->string(), "response_format.pattern"};
    return;
  }
  response_format = text::python_json(*field);
  format.kind = OutputFormat::Kind::kJsonObject;
  format.field = "response_format";
  if (type == "json_schema") {
    format = {OutputFormat::Kind::kJsonSchema, text::python_json(*field->find("json_schema")->find("schema")),
              "response_format.json_schema.schema"};
  }
}

void read_tool_policy(const Json& body, const ServedModel& model, ToolPolicy& policy) {
  policy.allows_parallel = flag_or(body, "parallel_tool_calls", true);
  if (const Json* choice = given(body, "tool_choice")) {
    if (choice->kind() == Json::Kind::kObject) {
      policy.choice = ToolChoice::kNamed;
      policy.named = choice->find("function")->find("name")->string();
    } else if (choice->string() != "auto") {
      policy.choice = choice->string() == "none" ? ToolChoice::kNone : ToolChoice::kRequired;
    }
  }
  check_tools(policy, model, "tool_choice");
}

void read_logprobs(const Json& body, GenerationOptions& options) {
  const Json* top = given(body, "top_logprobs");
  if (flag_or(body, "logprobs")) {
    options.num_logprobs = top == nullptr ? 0 : static_cast<int>(integer_of(*top));
  } else if (top != nullptr && top->number() != 0) {
    fail_field(kConflict, "top_logprobs", "logprobs to be true beside it", "false");
  }
}

ChatRequest read_chat(std::string_view text, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, chat_schema());
  ChatRequest request;
  request.options = read_generation(body, chat_schema(), model, {"max_completion_tokens", "max_tokens"});
  read_logprobs(body, request.options);
  read_thinking(body, model, request);
  std::string response_format;
  read_format(body, model, request.format, response_format);
  read_conversation(body, request, std::move(response_format));
  read_tool_policy(body, model, request.tools);
  return request;
}

}  // namespace

Schema messages_schema() {
  return array(message_schema(), kMaxMessages, 1);
}

Schema tools_schema() {
  return array(tagged("type",
                      {{"function",
                        {required("function", object({required("name", name(kMaxNameLength)),
                                                      optional("description", string(kMaxTextLength).or_null()),
                                                      optional("parameters", parameters_document().or_null()),
                                                      optional("strict", boolean().or_null())}))}}},
                      "function"),
               kMaxTools);
}

const Schema& chat_schema() {
  static const Schema kSchema = make_chat_schema();
  return kSchema;
}

void read_conversation(const Json& body, ChatRequest& request, std::string response_format) {
  for (const Json& item : body.find("messages")->array()) request.messages.push_back(read_message(item));
  std::vector<std::string> lines;
  if (const Json* tools = given(body, "tools")) {
    for (const Json& item : tools->array()) {
      const Json& function = *item.find("function");
      lines.push_back(text::python_json(function));
      const Json* parameters = given(function, "parameters");
      request.tools.tools.push_back({function.find("name")->string(),
                                     parameters == nullptr ? "" : text::python_json(*parameters),
                                     flag_or(function, "strict")});
    }
  }
  arrange_system(request.messages, std::move(lines), std::move(response_format));
  check_answerable(request.messages, "messages");
}

std::vector<Field> thinking_fields() {
  const Schema kwargs =
      object({optional("thinking", boolean().or_null()), optional("enable_thinking", boolean().or_null()),
              optional("reasoning_effort", effort_names().or_null())});
  const Schema budget = integer(0, kMaxTokens).or_null();
  const Schema thinking =
      tagged("type", {{"enabled", {optional("budget_tokens", budget)}}, {"adaptive", {}}, {"disabled", {}}});
  return {optional("reasoning_effort", effort_names().or_null()), optional("thinking", thinking.or_null()),
          optional("thinking_token_budget", budget), optional("chat_template_kwargs", kwargs.or_null())};
}

void read_thinking(const Json& body, const ServedModel& model, ChatRequest& request) {
  text::ChatOptions& chat = request.chat;
  chat.effort_table = model.effort_table;
  chat.thinking = model.thinks_by_default ? text::Thinking::kOn : text::Thinking::kOff;
  const Json* kwargs = given(body, "chat_template_kwargs");
  const Json* effort = given(body, "reasoning_effort");
  if (effort == nullptr && kwargs != nullptr) effort = given(*kwargs, "reasoning_effort");
  if (effort != nullptr) set_effort(chat, effort->string(), model);

  const auto turn = [&](bool is_on) { chat.thinking = is_on ? text::Thinking::kOn : text::Thinking::kOff; };
  if (kwargs != nullptr) {
    for (const std::string_view key : {"enable_thinking", "thinking"}) {
      if (given(*kwargs, key) != nullptr) turn(flag_or(*kwargs, key));
    }
  }
  const Json* budget = given(body, "thinking_token_budget");
  if (const Json* thinking = given(body, "thinking")) {
    turn(thinking->find("type")->string() != "disabled");
    if (budget == nullptr) budget = given(*thinking, "budget_tokens");
  }
  if (budget != nullptr) request.thinking_budget = integer_of(*budget);
}

Reply<ChatRequest> parse_chat(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read_chat(body, model); });
}

}  // namespace tessera::server::openai
