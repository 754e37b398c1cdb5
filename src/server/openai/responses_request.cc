// SPDX-License-Identifier: Apache-2.0
#include "server/openai/responses_request.h"

#include <fmt/format.h>

#include <utility>

#include "server/request_fields.h"
#include "text/chat/python_json.h"

namespace tessera::server::openai {

namespace {

Schema item_schema() {
  const Schema content = text_content({"input_text", "output_text", "text"});
  return tagged(
      "type",
      {{"message",
        {required("role", one_of({"user", "assistant", "system", "developer"})), required("content", content)}},
       {"reasoning",
        {optional("content", text_parts({"reasoning_text", "text"}).or_null()),
         optional("summary", text_parts({"summary_text"}).or_null())}},
       {"function_call",
        {required("call_id", string(kMaxIdLength)), required("name", string(kMaxIdLength, 1)),
         required("arguments", string(kMaxTextLength))}},
       {"function_call_output", {required("call_id", string(kMaxIdLength)), required("output", result_content())}}},
      "message");
}

Schema text_schema() {
  const Schema format = tagged(
      "type", {{"text", {}},
               {"json_object", {}},
               {"json_schema",
                {required("name", name(64)), required("schema", schema_document()),
                 optional("description", string(kMaxTextLength).or_null()), optional("strict", boolean().or_null())}}});
  return object({optional("format", format.or_null()), only_one_of("verbosity", {"medium"})});
}

Schema make_responses_schema() {
  const Schema tool = tagged(
      "type", {{"function",
                {required("name", name(kMaxNameLength)), optional("description", string(kMaxTextLength).or_null()),
                 optional("parameters", parameters_document().or_null()), optional("strict", boolean().or_null())}}});
  const Schema choice = either(
      {one_of({"auto", "none", "required"}), tagged("type", {{"function", {required("name", name(kMaxNameLength))}}})});
  const Schema reasoning = object({optional("effort", effort_names().or_null())});
  std::vector<Field> fields = without(generation_fields(), {"n", "stop", "stream_options"});
  append(fields, {
                     required("input", either({string(kMaxTextLength), array(item_schema(), kMaxMessages, 1)})),
                     optional("instructions", string(kMaxTextLength).or_null()),
                     optional("tools", array(tool, kMaxTools).or_null()),
                     optional("tool_choice", choice.or_null()),
                     optional("parallel_tool_calls", boolean().or_null()),
                     optional("text", text_schema().or_null()),
                     optional("reasoning", reasoning.or_null()),
                     optional("max_output_tokens", integer(1, kMaxTokens).or_null()),
                     optional("top_logprobs", integer(0, kMaxTopLogprobs).or_null()),
                     optional("include", array(string(64), 16).or_null()),
                     optional("metadata", map(string(512), 16).or_null()),
                     only_number("n", 1),
                     never("stop"),
                     only_boolean("store", false),
                     only_boolean("background", false),
                     only_one_of("truncation", {"disabled"}),
                     never("previous_response_id"),
                     never("conversation"),
                     never("prompt"),
                 });
  return object(std::move(fields));
}

std::string read_parts(const Json& item, std::string_view key) {
  const Json* parts = given(item, key);
  return parts == nullptr ? "" : read_text(*parts);
}

// Items of one answer become one assistant message: its reasoning, its text, its calls, in this order.
class ItemReader {
 public:
  explicit ItemReader(std::vector<text::Message>& messages) : messages_(messages) {}

  void read(const Json& item) {
    const std::string type = text_or(item, "type", "message");
    if (type == "reasoning") {
      std::string reasoning = read_parts(item, "content");
      if (reasoning.empty()) reasoning = read_parts(item, "summary");
      text::Message& message = assistant(last_ != Last::kReasoning);
      message.reasoning += reasoning;
      last_ = Last::kReasoning;
    } else if (type == "function_call") {
      assistant(last_ == Last::kNone)
          .tool_calls.push_back(
              {item.find("call_id")->string(), item.find("name")->string(), item.find("arguments")->string()});
      last_ = Last::kCall;
    } else if (type == "function_call_output") {
      text::Message& message = added(text::Role::kTool);
      message.tool_call_id = item.find("call_id")->string();
      message.content = read_result(*item.find("output"));
    } else {
      read_message(item);
    }
  }

 private:
  enum class Last { kNone, kReasoning, kText, kCall };  // of the assistant message at the end

  void read_message(const Json& item) {
    const std::string& role = item.find("role")->string();
    std::string content = read_text(*item.find("content"));
    if (role == "assistant") {
      assistant(last_ != Last::kReasoning).content = std::move(content);
      last_ = Last::kText;
    } else {
      added(role == "user" ? text::Role::kUser : text::Role::kSystem).content = std::move(content);
    }
  }

  text::Message& added(text::Role role) {
    last_ = Last::kNone;
    messages_.emplace_back().role = role;
    return messages_.back();
  }

  text::Message& assistant(bool is_new) {
    if (is_new) added(text::Role::kAssistant);
    return messages_.back();
  }

  std::vector<text::Message>& messages_;
  Last last_ = Last::kNone;
};

void read_format(const Json& body, const ServedModel& model, OutputFormat& format, std::string& response_format) {
  const Json* text = given(body, "text");
  const Json* field = text == nullptr ? nullptr : given(*text, "format");
  if (field == nullptr || field->find("type")->string() == "text") return;
  const std::string& type = field->find("type")->string();
  require_grammars(model, "text.format.type", "text: this server has no grammars", type);
  response_format = text::python_json(*field);
  format.kind = OutputFormat::Kind::kJsonObject;
  format.field = "text.format";
  if (type == "json_schema") {
    format = {OutputFormat::Kind::kJsonSchema, text::python_json(*field->find("schema")), "text.format.schema"};
  }
}

std::vector<std::string> read_tools(const Json& body, const ServedModel& model, ToolPolicy& policy) {
  std::vector<std::string> lines;
  if (const Json* tools = given(body, "tools")) {
    for (const Json& tool : tools->array()) lines.push_back(read_flat_tool(tool, "parameters", policy));
  }
  policy.allows_parallel = flag_or(body, "parallel_tool_calls", true);
  if (const Json* choice = given(body, "tool_choice")) {
    if (choice->kind() == Json::Kind::kObject) {
      policy.choice = ToolChoice::kNamed;
      policy.named = choice->find("name")->string();
    } else if (choice->string() != "auto") {
      policy.choice = choice->string() == "none" ? ToolChoice::kNone : ToolChoice::kRequired;
    }
  }
  check_tools(policy, model, "tool_choice");
  return lines;
}

// The fields that the answer repeats, as they were given or with these defaults.
std::string repeated_fields(const Json& body) {
  static constexpr std::pair<std::string_view, std::string_view> kDefaults[] = {
      {"instructions", "null"},
      {"max_output_tokens", "null"},
      {"metadata", "{}"},
      {"parallel_tool_calls", "true"},
      {"reasoning", "{\"effort\": null, \"summary\": null}"},
      {"temperature", "1.0"},
      {"text", "{\"format\": {\"type\": \"text\"}}"},
      {"tool_choice", "\"auto\""},
      {"tools", "[]"},
      {"top_p", "1.0"}};
  std::string out;
  for (const auto& [key, otherwise] : kDefaults) {
    const Json* value = given(body, key);
    out += fmt::format("{}\"{}\": {}", out.empty() ? "{" : ", ", key,
                       value == nullptr ? std::string(otherwise) : text::python_json(*value));
  }
  return out + "}";
}

ResponsesRequest read_responses(std::string_view text, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, responses_schema());
  ResponsesRequest request;
  ChatRequest& chat = request.chat;
  chat.options = read_generation(body, responses_schema(), model, {"max_output_tokens"});
  chat.chat.effort_table = model.effort_table;
  chat.chat.thinking = model.thinks_by_default ? text::Thinking::kOn : text::Thinking::kOff;
  if (const Json* reasoning = given(body, "reasoning");
      reasoning != nullptr && given(*reasoning, "effort") != nullptr) {
    set_effort(chat.chat, given(*reasoning, "effort")->string(), model);
  }
  if (const Json* include = given(body, "include")) {
    for (const Json& item : include->array()) {
      if (item.string() == "message.output_text.logprobs") request.wants_logprobs = true;
    }
  }
  if (request.wants_logprobs) {
    const Json* top = given(body, "top_logprobs");
    chat.options.num_logprobs = top == nullptr ? 0 : static_cast<int>(integer_of(*top));
  }
  if (const Json* instructions = given(body, "instructions")) {
    chat.messages.emplace_back().role = text::Role::kSystem;
    chat.messages.back().content = instructions->string();
  }
  const Json& input = *body.find("input");
  if (input.kind() == Json::Kind::kString) {
    chat.messages.emplace_back().content = input.string();
  } else {
    ItemReader reader(chat.messages);
    for (const Json& item : input.array()) reader.read(item);
  }
  std::string response_format;
  read_format(body, model, chat.format, response_format);
  arrange_system(chat.messages, read_tools(body, model, chat.tools), std::move(response_format));
  check_answerable(chat.messages, "input");
  request.repeated = repeated_fields(body);
  return request;
}

}  // namespace

const Schema& responses_schema() {
  static const Schema kSchema = make_responses_schema();
  return kSchema;
}

Reply<ResponsesRequest> parse_responses(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read_responses(body, model); });
}

}  // namespace tessera::server::openai
