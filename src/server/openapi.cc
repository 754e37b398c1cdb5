// SPDX-License-Identifier: Apache-2.0
#include "server/openapi.h"

#include <nlohmann/json.hpp>

#include "server/anthropic/messages_request.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"

namespace tessera::server {

namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson content(std::string_view type, OrderedJson schema) {
  return {{std::string(type), {{"schema", std::move(schema)}}}};
}

OrderedJson object_with(std::initializer_list<const char*> names) {
  return {{"type", "object"}, {"required", std::vector<std::string>(names.begin(), names.end())}};
}

OrderedJson error_answer(std::string_view about) {
  return {{"description", about}, {"content", content("application/json", {{"$ref", "#/components/schemas/Error"}})}};
}

// Answers that every route with a key may give, or every route that generates.
void add_errors(OrderedJson& responses, bool takes_body) {
  responses["401"] = error_answer("No API key, or another one.");
  if (!takes_body) return;
  responses["400"] = error_answer("The body is not what the schema says; the error names the field.");
  responses["404"] = error_answer("The model is not served.");
  responses["413"] = error_answer("The body is too large.");
  responses["429"] = error_answer("No room; Retry-After says when to come again.");
  responses["503"] = error_answer("Loading or draining.");
}

OrderedJson post(std::string_view about, const Schema& schema, OrderedJson answer, bool streams) {
  OrderedJson good = {{"description", "The answer."}, {"content", content("application/json", std::move(answer))}};
  // OpenAPI 3.1 can't say what an event holds; a schema of the whole text would be held against each event by some.
  if (streams) good["content"]["text/event-stream"] = OrderedJson::object();
  OrderedJson responses = {{"200", std::move(good)}};
  add_errors(responses, true);
  const OrderedJson body = {{"required", true},
                            {"content", content("application/json", OrderedJson::parse(json_schema(schema)))}};
  return {{"post", {{"summary", about}, {"requestBody", body}, {"responses", std::move(responses)}}}};
}

OrderedJson get(std::string_view about, std::string_view type, OrderedJson answer, bool needs_key = true) {
  OrderedJson responses = {{"200", {{"description", "The answer."}, {"content", content(type, std::move(answer))}}}};
  if (needs_key) add_errors(responses, false);
  OrderedJson route = {{"summary", about}, {"responses", std::move(responses)}};
  if (!needs_key) route["security"] = OrderedJson::array();
  return {{"get", std::move(route)}};
}

OrderedJson health(std::string_view about, bool needs_key) {
  OrderedJson route = get(about, "application/json", object_with({"status"}), needs_key);
  route["get"]["responses"]["503"] = {{"description", "Not ready."},
                                      {"content", content("application/json", object_with({"status"}))}};
  return route;
}

}  // namespace

std::string render_openapi(std::string_view version) {
  OrderedJson out = {{"openapi", "3.1.0"}};
  out["info"] = {{"title", "Tessera"}, {"version", version}};
  OrderedJson paths = OrderedJson::object();
  paths["/v1/chat/completions"] = post("A conversation's next message.", openai::chat_schema(),
                                       object_with({"id", "object", "created", "model", "choices", "usage"}), true);
  paths["/v1/completions"] = post("A text's continuation.", openai::completion_schema(),
                                  object_with({"id", "object", "created", "model", "choices", "usage"}), true);
  paths["/v1/responses"] = post("A conversation's next items; nothing is stored.", openai::responses_schema(),
                                object_with({"id", "object", "created_at", "model", "status", "output"}), true);
  paths["/v1/messages"] =
      post("A conversation's next message, as Anthropic has it.", anthropic::messages_schema(),
           object_with({"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}), true);
  paths["/v1/messages/count_tokens"] =
      post("Tokens of a conversation.", anthropic::count_tokens_schema(), object_with({"input_tokens"}), false);
  paths["/tokenize"] = post("Token ids of a text or a conversation.", openai::tokenize_schema(),
                            object_with({"count", "max_model_len", "tokens"}), false);
  paths["/detokenize"] = post("The text of token ids.", openai::detokenize_schema(), object_with({"prompt"}), false);
  paths["/v1/models"] = get("The models that are served.", "application/json", object_with({"object", "data"}));
  paths["/v1/models/{model}"] = get("One of them.", "application/json", object_with({"id", "object"}));
  paths["/v1/models/{model}"]["get"]["parameters"] =
      OrderedJson::array({{{"name", "model"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}}});
  paths["/v1/models/{model}"]["get"]["responses"]["404"] = error_answer("The model is not served.");
  paths["/health/live"] = health("Whether the process answers.", false);
  paths["/health/ready"] = health("Whether requests are taken.", false);
  paths["/health/deep"] = health("Whether a token can be made.", true);
  paths["/metrics"] = get("Figures for Prometheus.", "text/plain", {{"type", "string"}});
  paths["/openapi.json"] = get("This document.", "application/json", object_with({"openapi", "paths"}));
  out["paths"] = std::move(paths);
  out["components"]["schemas"]["Error"] = {{"type", "object"},
                                           {"required", OrderedJson::array({"error"})},
                                           {"properties",
                                            {{"error",
                                              {{"type", "object"},
                                               {"required", OrderedJson::array({"message", "type"})},
                                               {"properties",
                                                {{"message", {{"type", "string"}}},
                                                 {"type", {{"type", "string"}}},
                                                 {"param", {{"type", OrderedJson::array({"string", "null"})}}},
                                                 {"code", {{"type", OrderedJson::array({"string", "null"})}}}}}}}}}};
  out["components"]["securitySchemes"] = {{"key", {{"type", "http"}, {"scheme", "bearer"}}},
                                          {"header", {{"type", "apiKey"}, {"in", "header"}, {"name", "x-api-key"}}}};
  out["security"] =
      OrderedJson::array({OrderedJson{{"key", OrderedJson::array()}}, OrderedJson{{"header", OrderedJson::array()}}});
  return out.dump();
}

}  // namespace tessera::server
