// SPDX-License-Identifier: Apache-2.0
#include "server/openai/chat_response.h"

#include <string_view>

#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

JsonObject head_json(const AnswerHead& head, std::string_view object) {
  JsonObject out{{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
  if (!head.fingerprint.empty()) out.add("system_fingerprint", head.fingerprint);
  return out;
}

JsonObject message_json(const FinishedAnswer& answer) {
  // As OpenAI has it: null where there are only calls.
  const bool is_null = answer.content.empty() && !answer.calls.empty();
  JsonObject message{
      {"role", "assistant"}, {"content", is_null ? JsonText() : JsonText(answer.content)}, {"refusal", nullptr}};
  if (!answer.reasoning.empty()) message.add("reasoning_content", answer.reasoning);
  if (answer.calls.empty()) return message;
  JsonArray calls;
  for (const AnswerCall& call : answer.calls) {
    calls.add(JsonObject{{"id", call.id},
                         {"type", "function"},
                         {"function", JsonObject{{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return message.add("tool_calls", calls);
}

JsonObject call_delta_json(const CallDelta& call) {
  JsonObject out{{"index", call.index}}, function;
  if (call.begins) {
    out.add("id", call.id).add("type", "function");
    function.add("name", call.name);
  }
  function.add("arguments", call.arguments);
  return out.add("function", function);
}

JsonObject delta_json(const AnswerDelta& delta) {
  JsonObject out;
  if (!delta.reasoning.empty()) out.add("reasoning_content", delta.reasoning);
  if (!delta.content.empty()) out.add("content", delta.content);
  JsonArray calls;
  for (const CallDelta& call : delta.calls) {
    if (call.begins || !call.arguments.empty()) calls.add(call_delta_json(call));
  }
  if (!calls.is_empty()) out.add("tool_calls", calls);
  return out;
}

bool has_logprobs_in(const AnswerDelta& delta) {
  return !delta.reasoning_logprobs.empty() || !delta.content_logprobs.empty();
}

JsonText logprobs_of(const AnswerDelta& delta, bool has_logprobs) {
  if (!has_logprobs || !has_logprobs_in(delta)) return nullptr;
  return chat_logprobs_json(delta.reasoning_logprobs, delta.content_logprobs);
}

std::string chunk(const AnswerHead& head, bool has_usage, const JsonArray& choices, const JsonText& usage = nullptr) {
  JsonObject out = head_json(head, "chat.completion.chunk").add("choices", choices);
  if (has_usage) out.add("usage", usage);
  return sse_data(out.text());
}

JsonArray choice_json(int choice_idx, const JsonObject& delta, const JsonText& logprobs, const JsonText& reason) {
  return {JsonObject{{"index", choice_idx}, {"delta", delta}, {"logprobs", logprobs}, {"finish_reason", reason}}};
}

}  // namespace

std::string render_chat(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                        bool has_logprobs) {
  JsonArray list;
  for (const FinishedAnswer& answer : choices) {
    JsonText logprobs;
    if (has_logprobs) logprobs = chat_logprobs_json(answer.reasoning_logprobs, answer.content_logprobs);
    list.add(JsonObject{{"index", list.size()},
                        {"message", message_json(answer)},
                        {"logprobs", logprobs},
                        {"finish_reason", to_string(answer.reason)}});
  }
  return head_json(head, "chat.completion").add("choices", list).add("usage", usage_json(usage)).text();
}

std::string ChatStream::begin(int choice_idx) const {
  const JsonObject first{{"role", "assistant"}, {"content", ""}};
  return chunk(head_, has_usage_, choice_json(choice_idx, first, nullptr, nullptr));
}

std::string ChatStream::delta(int choice_idx, const AnswerDelta& delta) const {
  const JsonObject text = delta_json(delta);
  if (text.is_empty() && !(has_logprobs_ && has_logprobs_in(delta))) return "";
  return chunk(head_, has_usage_, choice_json(choice_idx, text, logprobs_of(delta, has_logprobs_), nullptr));
}

std::string ChatStream::end(int choice_idx, const AnswerDelta& last, FinishReason reason) const {
  return chunk(head_, has_usage_,
               choice_json(choice_idx, delta_json(last), logprobs_of(last, has_logprobs_), to_string(reason)));
}

std::string ChatStream::usage(const Usage& usage) const {
  return chunk(head_, true, {}, usage_json(usage));
}

std::string ChatStream::error(const ApiError& error) const {
  return sse_data(openai_error_body(error));
}

}  // namespace tessera::server::openai
