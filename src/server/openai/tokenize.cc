// SPDX-License-Identifier: Apache-2.0
#include "server/openai/tokenize.h"

#include <fmt/format.h>

#include <algorithm>

#include "server/json_text.h"
#include "server/openai/chat_request.h"
#include "server/request_fields.h"

namespace tessera::server::openai {

namespace {

Schema make_tokenize_schema() {
  std::vector<Field> fields = {optional("model", string(kMaxNameLength, 1).or_null()),
                               optional("prompt", string(kMaxTextLength).or_null()),
                               optional("messages", messages_schema().or_null()),
                               optional("tools", tools_schema().or_null()),
                               optional("add_special_tokens", boolean().or_null()),
                               optional("return_token_strs", boolean().or_null()),
                               only_boolean("add_generation_prompt", true),
                               only_boolean("continue_final_message", false)};
  append(fields, thinking_fields());
  return object(std::move(fields));
}

void check_model(const Json& body, const ServedModel& model) {
  const Json* name = given(body, "model");
  if (name == nullptr) return;
  if (std::find(model.names.begin(), model.names.end(), name->string()) == model.names.end()) {
    throw RequestError(model_not_found(name->string(), model.names));
  }
}

TokenizeRequest read_tokenize(std::string_view text, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, tokenize_schema());
  check_model(body, model);
  TokenizeRequest request;
  request.adds_begin_token = flag_or(body, "add_special_tokens", true);
  request.shows_tokens = flag_or(body, "return_token_strs");
  const Json *prompt = given(body, "prompt"), *messages = given(body, "messages");
  if ((prompt == nullptr) == (messages == nullptr)) {
    fail_field(kConflict, "prompt", "either prompt or messages", prompt == nullptr ? "neither" : "both");
  }
  if (prompt != nullptr) {
    request.input = prompt->string();
    return request;
  }
  ChatRequest chat;
  read_thinking(body, model, chat);
  read_conversation(body, chat, "");
  request.input = std::move(chat);
  return request;
}

std::vector<int32_t> read_detokenize(std::string_view text, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, detokenize_schema());
  check_model(body, model);
  std::vector<int32_t> ids;
  for (const Json& item : body.find("tokens")->array()) {
    const int64_t id = integer_of(item);
    if (id >= model.vocab_size) {
      fail_field(kInvalidValue, fmt::format("tokens[{}]", ids.size()),
                 fmt::format("token ids from 0 to {}", model.vocab_size - 1), fmt::format("{}", id));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace

const Schema& tokenize_schema() {
  static const Schema kSchema = make_tokenize_schema();
  return kSchema;
}

const Schema& detokenize_schema() {
  static const Schema kSchema =
      object({optional("model", string(kMaxNameLength, 1).or_null()),
              required("tokens", array(integer(0, INT32_MAX), static_cast<size_t>(kMaxTokens)))});
  return kSchema;
}

Reply<TokenizeRequest> parse_tokenize(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read_tokenize(body, model); });
}

Reply<std::vector<int32_t>> parse_detokenize(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read_detokenize(body, model); });
}

std::string render_tokenize(std::span<const int32_t> ids, std::span<const std::string> texts, int64_t max_model_len) {
  JsonArray tokens, strings;
  for (const int32_t id : ids) tokens.add(id);
  for (const std::string& text : texts) strings.add(text);
  JsonObject out{{"count", ids.size()}, {"max_model_len", max_model_len}, {"tokens", tokens}};
  if (!texts.empty()) out.add("token_strs", strings);
  return out.text();
}

std::string render_detokenize(const std::string& text) {
  return JsonObject{{"prompt", text}}.text();
}

}  // namespace tessera::server::openai
