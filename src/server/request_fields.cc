// SPDX-License-Identifier: Apache-2.0
#include "server/request_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <utility>

#include "base/strings.h"
#include "server/api_error.h"
#include "text/chat/python_json.h"

namespace tessera::server {

namespace {

void append_paragraph(std::string& text, std::string_view more) {
  if (!text.empty() && !more.empty()) text += "\n\n";
  text += more;
}

// The members of a body that its schema names: others were not checked, whatever they are called.
struct KnownFields {
  const Json& body;
  const Schema& schema;

  const Json* given(std::string_view key) const {
    const bool is_known =
        std::any_of(schema.fields.begin(), schema.fields.end(), [&](const Field& field) { return field.name == key; });
    return is_known ? server::given(body, key) : nullptr;
  }
};

std::vector<std::string> read_stops(const KnownFields& body) {
  const Json* stop = body.given("stop");
  if (stop == nullptr) return {};
  if (stop->kind() == Json::Kind::kString) return {stop->string()};
  std::vector<std::string> stops;
  for (const Json& item : stop->array()) stops.push_back(item.string());
  return stops;
}

void read_logit_bias(const KnownFields& body, const ServedModel& model, engine::SamplingOptions& sampling) {
  const Json* field = body.given("logit_bias");
  if (field == nullptr) return;
  for (const auto& [key, bias] : field->object()) {
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || id >= model.vocab_size) {
      fail_field(kInvalidValue, fmt::format("logit_bias.{}", key),
                 fmt::format("token ids from 0 to {}", model.vocab_size - 1), key);
    }
    sampling.logit_bias.emplace_back(id, static_cast<float>(bias.number()));
  }
}

float number_or(const KnownFields& body, std::string_view key, float otherwise) {
  const Json* value = body.given(key);
  return value == nullptr ? otherwise : static_cast<float>(value->number());
}

engine::SamplingOptions read_sampling(const KnownFields& body, const ServedModel& model) {
  engine::SamplingOptions sampling;
  sampling.params.temperature = number_or(body, "temperature", 1);
  sampling.params.top_p = number_or(body, "top_p", 1);
  sampling.params.min_p = number_or(body, "min_p", 0);
  sampling.params.repetition_penalty = number_or(body, "repetition_penalty", 1);
  sampling.params.frequency_penalty = number_or(body, "frequency_penalty", 0);
  sampling.params.presence_penalty = number_or(body, "presence_penalty", 0);
  if (const Json* top_k = body.given("top_k")) {
    sampling.params.top_k = static_cast<int32_t>(std::max<int64_t>(integer_of(*top_k), 0));
  }
  // The sampler wants a share above zero; nothing but the likeliest token is the limit towards it.
  if (sampling.params.top_p <= 0) {
    sampling.params.top_p = 1;
    sampling.params.temperature = 0;
  }
  read_logit_bias(body, model, sampling);
  return sampling;
}

}  // namespace

const Json* given(const Json& object, std::string_view key) {
  const Json* member = object.find(key);
  return member == nullptr || member->kind() == Json::Kind::kNull ? nullptr : member;
}

std::string text_or(const Json& object, std::string_view key, std::string_view otherwise) {
  const Json* member = given(object, key);
  return member == nullptr ? std::string(otherwise) : member->string();
}

int64_t integer_of(const Json& value) {
  return value.kind() == Json::Kind::kDouble ? static_cast<int64_t>(value.number()) : value.integer();
}

bool flag_or(const Json& object, std::string_view key, bool otherwise) {
  const Json* member = given(object, key);
  return member == nullptr ? otherwise : member->boolean();
}

Json parse_body(std::string_view body) {
  try {
    return Json::parse_exact(body, "body", kMaxBodyValues);
  } catch (const Error& error) {
    ApiError out;
    out.code = kMalformedJson;
    out.message = error.what();
    throw RequestError(std::move(out));
  }
}

std::vector<Field> generation_fields() {
  Schema biases = map(number(-100, 100), kMaxLogitBiases);
  biases.characters = "0-9";
  return {
      required("model", string(kMaxNameLength, 1)),
      optional("temperature", number(0, 2).or_null()),
      optional("top_p", number(0, 1).or_null()),
      optional("min_p", number(0, 1).or_null()),
      optional("top_k", integer(-1, 1 << 30).or_null()),
      optional("presence_penalty", number(-2, 2).or_null()),
      optional("frequency_penalty", number(-2, 2).or_null()),
      optional("repetition_penalty", number(0.01, 100).or_null()),
      optional("seed", integer(INT64_MIN, INT64_MAX).or_null()),
      optional("logit_bias", biases.or_null()),
      optional("stop", either({text_of(kMaxStopBytes, 1), array(text_of(kMaxStopBytes, 1), kMaxStops)}).or_null()),
      optional("n", integer(1, kMaxChoices).or_null()),
      optional("stream", boolean().or_null()),
      optional("stream_options", object({optional("include_usage", boolean().or_null())}).or_null()),
      optional("ignore_eos", boolean().or_null()),
      optional("cache_salt", string(kMaxIdLength).or_null()),
      optional("priority", integer(-100, 100).or_null()),
      // Known, with a meaning, and not honoured.
      only_number("best_of", 1),
      only_number("min_tokens", 0),
      only_number("length_penalty", 1),
      only_boolean("use_beam_search", false),
      only_boolean("include_stop_str_in_output", false),
      only_boolean("skip_special_tokens", true),
      never("stop_token_ids"),
      never("bad_words"),
      never("allowed_token_ids"),
      never("prompt_logprobs"),
      never("truncate_prompt_tokens"),
      never("logits_processors"),
      never("guided_json"),
      never("guided_regex"),
      never("guided_choice"),
      never("guided_grammar"),
      never("structured_outputs"),
      never("structural_tag"),
      never("grammar"),
  };
}

GenerationOptions read_generation(const Json& body, const Schema& schema, const ServedModel& model,
                                  const std::vector<std::string>& max_tokens_keys) {
  const KnownFields fields{body, schema};
  GenerationOptions options;
  const auto is_set = [&](std::string_view key) { return fields.given(key) != nullptr && flag_or(body, key); };
  options.model = body.find("model")->string();
  if (std::find(model.names.begin(), model.names.end(), options.model) == model.names.end()) {
    throw RequestError(model_not_found(options.model, model.names));
  }
  options.sampling = read_sampling(fields, model);
  if (const Json* seed = fields.given("seed")) options.seed = static_cast<uint64_t>(integer_of(*seed));
  for (const std::string& key : max_tokens_keys) {
    const Json* most = fields.given(key);
    if (most != nullptr && !options.max_tokens) options.max_tokens = integer_of(*most);
  }
  if (const Json* n = fields.given("n")) options.num_choices = static_cast<int>(integer_of(*n));
  options.stops = read_stops(fields);
  options.is_stream = is_set("stream");
  if (const Json* stream = fields.given("stream_options")) options.streams_usage = flag_or(*stream, "include_usage");
  options.ignores_end_token = is_set("ignore_eos");
  options.cache_salt = fields.given("cache_salt") == nullptr ? "" : text_or(body, "cache_salt");
  if (const Json* priority = fields.given("priority")) options.priority = static_cast<int>(integer_of(*priority));
  options.ignored = unknown_fields(body, schema);
  return options;
}

std::vector<Field> without(std::vector<Field> fields, const std::vector<std::string>& names) {
  std::erase_if(fields,
                [&](const Field& field) { return std::find(names.begin(), names.end(), field.name) != names.end(); });
  return fields;
}

void append(std::vector<Field>& fields, std::vector<Field> more) {
  std::move(more.begin(), more.end(), std::back_inserter(fields));
}

Schema schema_document() {
  return any_object(kMaxSchemaBytes);
}

Schema parameters_document() {
  const Schema type = either({one_of({"object"}), array(string(32), 8, 1)});
  const Schema properties = map(either({any_object(kMaxSchemaBytes), boolean()}), kMaxSchemaBytes);
  Schema schema = object({optional("type", type.or_null()), optional("properties", properties.or_null()),
                          optional("required", array(string(kMaxTextLength), kMaxSchemaBytes).or_null())});
  schema.max_bytes = kMaxSchemaBytes;
  return schema;
}

Schema text_parts(const std::vector<std::string>& types) {
  std::vector<Tagged> choices;
  for (const std::string& type : types) choices.push_back({type, {required("text", string(kMaxTextLength))}});
  return array(tagged("type", std::move(choices)), kMaxParts);
}

Schema text_content(const std::vector<std::string>& types) {
  return either({string(kMaxTextLength), text_parts(types)});
}

std::string read_text(const Json& content) {
  if (content.kind() != Json::Kind::kArray) return content.string();
  std::string text;
  std::string_view separator;
  for (const Json& part : content.array()) {
    text += separator;
    text += part.find("text")->string();
    separator = "\n\n";
  }
  return text;
}

Schema effort_names() {
  return one_of({"none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"});
}

void set_effort(text::ChatOptions& options, std::string_view name, const ServedModel& model) {
  options.effort_table = model.effort_table;
  options.thinking = name == "none" ? text::Thinking::kOff : text::Thinking::kOn;
  options.effort = text::effort_from_api_name(name, model.effort_table).value_or(text::Effort::kDefault);
}

void require_grammars(const ServedModel& model, const std::string& field, std::string_view neutral,
                      std::string_view found) {
  if (!model.has_grammars) fail_field(kUnsupported, field, neutral, found);
}

std::string read_flat_tool(const Json& tool, std::string_view parameters_key, ToolPolicy& policy) {
  const Json *parameters = given(tool, parameters_key), *description = given(tool, "description");
  const std::string& name = tool.find("name")->string();
  policy.parameters_field = parameters_key;
  policy.tools.push_back({name, parameters == nullptr ? "" : text::python_json(*parameters), flag_or(tool, "strict")});
  std::string line = fmt::format("{{\"name\": {}", text::json_quoted(name));
  if (description != nullptr) line += fmt::format(", \"description\": {}", text::json_quoted(description->string()));
  if (parameters != nullptr) line += fmt::format(", \"parameters\": {}", policy.tools.back().parameters);
  return line + "}";
}

Schema result_content() {
  const Schema part = object({required("type", string(64, 1)), optional("text", string(kMaxTextLength).or_null())});
  return either({string(kMaxTextLength), array(part, kMaxParts)});
}

std::string read_result(const Json& content) {
  if (content.kind() != Json::Kind::kArray) return content.string();
  std::string out;
  for (const Json& part : content.array()) {
    const Json* text = given(part, "text");
    if (!out.empty()) out += "\n\n";
    out += text != nullptr ? text->string() : fmt::format("[Unsupported {}]", part.find("type")->string());
  }
  return out;
}

void arrange_system(std::vector<text::Message>& messages, std::vector<std::string> tool_texts,
                    std::string response_format) {
  const auto is_system = [](const text::Message& message) { return message.role == text::Role::kSystem; };
  const auto first_other = std::find_if_not(messages.begin(), messages.end(), is_system);
  text::Message leading;
  leading.role = text::Role::kSystem;
  for (auto message = messages.begin(); message != first_other; ++message) {
    append_paragraph(leading.content, message->content);
  }
  leading.tools = std::move(tool_texts);
  leading.response_format = std::move(response_format);
  messages.erase(messages.begin(), first_other);
  for (text::Message& message : messages) {
    if (is_system(message)) message.role = text::Role::kUser;
  }
  if (!leading.content.empty() || !leading.tools.empty() || !leading.response_format.empty()) {
    messages.insert(messages.begin(), std::move(leading));
  }
}

void check_answerable(const std::vector<text::Message>& messages, const std::string& field) {
  const bool is_empty = messages.empty() || messages.back().role == text::Role::kSystem;
  if (is_empty) fail_field(kInvalidValue, field, "a message to answer", "none but system messages");
  const text::Message& last = messages.back();
  if (last.role == text::Role::kAssistant && !last.is_open) {
    fail_field(kInvalidValue, field, "a user's or a tool's message, or an assistant's text to go on with, at the end",
               "an assistant's finished message");
  }
}

void check_tools(const ToolPolicy& policy, const ServedModel& model, const std::string& field) {
  if (policy.choice == ToolChoice::kAuto || policy.choice == ToolChoice::kNone) return;
  const std::string_view found = policy.choice == ToolChoice::kRequired ? "required" : "a named tool";
  if (policy.tools.empty()) fail_field(kConflict, field, "tools beside it", "none");
  const bool is_known = std::any_of(policy.tools.begin(), policy.tools.end(),
                                    [&](const Tool& tool) { return tool.name == policy.named; });
  if (policy.choice == ToolChoice::kNamed && !is_known) {
    std::string names;
    for (const Tool& tool : policy.tools) names += (names.empty() ? "" : ", ") + tool.name;
    fail_field(kConflict, field, "the name of one of the tools (" + names + ")",
               fmt::format("\"{}\"", printable(policy.named, 80)));
  }
  require_grammars(model, field, "auto or none: this server has no grammars", found);
}

}  // namespace tessera::server
