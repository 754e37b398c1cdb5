// SPDX-License-Identifier: Apache-2.0
#include "server/openapi.h"

#include <initializer_list>

#include "server/anthropic/messages_request.h"
#include "server/json_text.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"

namespace tessera::server {

namespace {

constexpr std::string_view kForeignPage = "A page of another site asks (see Origin).";

JsonObject content(std::string_view type, const JsonText& schema) {
  return {{type, JsonObject{{"schema", schema}}}};
}

JsonObject object_with(std::initializer_list<JsonText> names) {
  return {{"type", "object"}, {"required", JsonArray(names)}};
}

JsonObject answer_of(std::string_view about, const JsonObject& its_content) {
  return {{"description", about}, {"content", its_content}};
}

JsonObject error_answer(std::string_view about) {
  return answer_of(about, content("application/json", JsonObject{{"$ref", "#/components/schemas/Error"}}));
}

// Answers that every route with a key may give, or every route that generates.
void add_errors(JsonObject& responses, bool takes_body) {
  responses.add("401", error_answer("No API key, or another one."));
  responses.add("403", error_answer(kForeignPage));
  if (!takes_body) return;
  responses.add("400", error_answer("The body is not what the schema says; the error names the field."));
  responses.add("404", error_answer("The model is not served."));
  responses.add("413", error_answer("The body is too large."));
  responses.add("415", error_answer("The body is compressed."));
  responses.add("429", error_answer("No room; Retry-After says when to come again."));
  responses.add("501", error_answer("A transfer coding that is not chunked alone."));
  responses.add("503", error_answer("Loading or draining."));
  responses.add("504", error_answer("The answer took longer than the server allows."));
}

JsonObject post(std::string_view about, const Schema& schema, const JsonObject& answer, bool streams) {
  JsonObject good = content("application/json", answer);
  // OpenAPI 3.1 can't say what an event holds; a schema of the whole text would be held against each event by some.
  if (streams) good.add("text/event-stream", JsonObject());
  JsonObject responses{{"200", answer_of("The answer.", good)}};
  add_errors(responses, true);
  const JsonObject body{{"required", true},
                        {"content", content("application/json", JsonText::raw(json_schema(schema)))}};
  return {{"post", JsonObject{{"summary", about}, {"requestBody", body}, {"responses", responses}}}};
}

// `responses` beside the answer.
JsonObject get(std::string_view about, std::string_view type, const JsonObject& answer, bool needs_key,
               const JsonObject& others, const JsonArray& parameters) {
  JsonObject responses{{"200", answer_of("The answer.", content(type, answer))}};
  if (needs_key) add_errors(responses, false);
  JsonObject route{{"summary", about}, {"responses", responses.add_members_of(others.text())}};
  if (!needs_key) route.add("security", JsonArray());
  if (!parameters.is_empty()) route.add("parameters", parameters);
  return {{"get", route}};
}

JsonObject get(std::string_view about, std::string_view type, const JsonObject& answer) {
  return get(about, type, answer, true, {{"503", error_answer("Loading.")}}, {});
}

JsonObject health(std::string_view about, bool needs_key) {
  const JsonObject answer = object_with({"status"});
  JsonObject others{{"503", answer_of("Not ready.", content("application/json", answer))}};
  if (!needs_key) others.add("403", error_answer(kForeignPage));
  return get(about, "application/json", answer, needs_key, others, {});
}

JsonObject components() {
  const JsonObject text{{"type", "string"}}, text_or_null{{"type", JsonArray{"string", "null"}}};
  const JsonObject parts{{"message", text}, {"type", text}, {"param", text_or_null}, {"code", text_or_null}};
  const JsonObject error = object_with({"message", "type"}).add("properties", parts);
  return {{"schemas", JsonObject{{"Error", object_with({"error"}).add("properties", JsonObject{{"error", error}})}}},
          {"securitySchemes",
           JsonObject{{"key", JsonObject{{"type", "http"}, {"scheme", "bearer"}}},
                      {"header", JsonObject{{"type", "apiKey"}, {"in", "header"}, {"name", "x-api-key"}}}}}};
}

}  // namespace

std::string render_openapi(std::string_view version) {
  JsonObject paths;
  paths.add("/v1/chat/completions", post("A conversation's next message.", openai::chat_schema(),
                                         object_with({"id", "object", "created", "model", "choices", "usage"}), true));
  paths.add("/v1/completions", post("A text's continuation.", openai::completion_schema(),
                                    object_with({"id", "object", "created", "model", "choices", "usage"}), true));
  paths.add("/v1/responses", post("A conversation's next items; nothing is stored.", openai::responses_schema(),
                                  object_with({"id", "object", "created_at", "model", "status", "output"}), true));
  paths.add(
      "/v1/messages",
      post("A conversation's next message, as Anthropic has it.", anthropic::messages_schema(),
           object_with({"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}), true));
  paths.add("/v1/messages/count_tokens",
            post("Tokens of a conversation.", anthropic::count_tokens_schema(), object_with({"input_tokens"}), false));
  paths.add("/tokenize", post("Token ids of a text or a conversation.", openai::tokenize_schema(),
                              object_with({"count", "max_model_len", "tokens"}), false));
  paths.add("/detokenize", post("The text of token ids.", openai::detokenize_schema(), object_with({"prompt"}), false));
  paths.add("/v1/models", get("The models that are served.", "application/json", object_with({"object", "data"})));
  const JsonObject name{
      {"name", "model"}, {"in", "path"}, {"required", true}, {"schema", JsonObject{{"type", "string"}}}};
  paths.add("/v1/models/{model}",
            get("One of them.", "application/json", object_with({"id", "object"}), true,
                {{"404", error_answer("The model is not served.")}, {"503", error_answer("Loading.")}}, {name}));
  paths.add("/health", health("Whether the process answers, and has loaded its model.", false));
  paths.add("/health/live", health("Whether the process answers.", false));
  paths.add("/health/ready", health("Whether requests are taken.", false));
  paths.add("/health/deep", health("Whether a token can be made.", true));
  paths.add("/metrics", get("Figures for Prometheus.", "text/plain", JsonObject{{"type", "string"}}));
  paths.add("/openapi.json", get("This document.", "application/json", object_with({"openapi", "paths"})));
  const JsonObject out{{"openapi", "3.1.0"},
                       {"info", JsonObject{{"title", "Tessera"}, {"version", version}}},
                       {"paths", paths},
                       {"components", components()},
                       {"security", JsonArray{JsonObject{{"key", JsonArray()}}, JsonObject{{"header", JsonArray()}}}}};
  return out.text();
}

}  // namespace tessera::server
