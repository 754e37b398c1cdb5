// SPDX-License-Identifier: Apache-2.0
#include "server/openai/chat_response.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson head_json(const AnswerHead& head, std::string_view object) {
  OrderedJson out = {{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
  if (!head.fingerprint.empty()) out["system_fingerprint"] = head.fingerprint;
  return out;
}

OrderedJson message_json(const FinishedAnswer& answer) {
  OrderedJson message = {{"role", "assistant"}};
  // As OpenAI has it: null where there are only calls.
  const bool is_null = answer.content.empty() && !answer.calls.empty();
  message["content"] = is_null ? OrderedJson() : OrderedJson(answer.content);
  message["refusal"] = nullptr;
  if (!answer.reasoning.empty()) message["reasoning_content"] = answer.reasoning;
  if (answer.calls.empty()) return message;
  OrderedJson calls = OrderedJson::array();
  for (const AnswerCall& call : answer.calls) {
    calls.push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  message["tool_calls"] = std::move(calls);
  return message;
}

OrderedJson call_delta_json(const CallDelta& call) {
  OrderedJson out = {{"index", call.index}};
  OrderedJson function = OrderedJson::object();
  if (call.begins) {
    out["id"] = call.id;
    out["type"] = "function";
    function["name"] = call.name;
  }
  function["arguments"] = call.arguments;
  out["function"] = std::move(function);
  return out;
}

OrderedJson delta_json(const AnswerDelta& delta) {
  OrderedJson out = OrderedJson::object();
  if (!delta.reasoning.empty()) out["reasoning_content"] = delta.reasoning;
  if (!delta.content.empty()) out["content"] = delta.content;
  OrderedJson calls = OrderedJson::array();
  for (const CallDelta& call : delta.calls) {
    if (call.begins || !call.arguments.empty()) calls.push_back(call_delta_json(call));
  }
  if (!calls.empty()) out["tool_calls"] = std::move(calls);
  return out;
}

OrderedJson logprobs_of(const AnswerDelta& delta, bool has_logprobs) {
  if (!has_logprobs) return nullptr;
  if (delta.reasoning_logprobs.empty() && delta.content_logprobs.empty()) return nullptr;
  return chat_logprobs_json(delta.reasoning_logprobs, delta.content_logprobs);
}

std::string chunk(const AnswerHead& head, bool has_usage, OrderedJson choices, OrderedJson usage = nullptr) {
  OrderedJson out = head_json(head, "chat.completion.chunk");
  out["choices"] = std::move(choices);
  if (has_usage) out["usage"] = std::move(usage);
  return sse_data(dumped(out));
}

OrderedJson choice_json(int choice_idx, OrderedJson delta, OrderedJson logprobs, OrderedJson reason) {
  OrderedJson choice = {{"index", choice_idx}};
  choice["delta"] = std::move(delta);
  choice["logprobs"] = std::move(logprobs);
  choice["finish_reason"] = std::move(reason);
  return OrderedJson::array({std::move(choice)});
}

}  // namespace

std::string render_chat(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                        bool has_logprobs) {
  OrderedJson out = head_json(head, "chat.completion");
  OrderedJson list = OrderedJson::array();
  for (const FinishedAnswer& answer : choices) {
    OrderedJson choice = {{"index", list.size()}, {"message", message_json(answer)}};
    choice["logprobs"] =
        has_logprobs ? chat_logprobs_json(answer.reasoning_logprobs, answer.content_logprobs) : OrderedJson();
    choice["finish_reason"] = to_string(answer.reason);
    list.push_back(std::move(choice));
  }
  out["choices"] = std::move(list);
  out["usage"] = usage_json(usage);
  return dumped(out);
}

std::string ChatStream::begin(int choice_idx) const {
  return chunk(head_, has_usage_, choice_json(choice_idx, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr));
}

std::string ChatStream::delta(int choice_idx, const AnswerDelta& delta) const {
  const OrderedJson text = delta_json(delta), logprobs = logprobs_of(delta, has_logprobs_);
  if (text.empty() && logprobs.is_null()) return "";
  return chunk(head_, has_usage_, choice_json(choice_idx, text, logprobs, nullptr));
}

std::string ChatStream::end(int choice_idx, const AnswerDelta& last, FinishReason reason) const {
  return chunk(head_, has_usage_,
               choice_json(choice_idx, delta_json(last), logprobs_of(last, has_logprobs_), to_string(reason)));
}

std::string ChatStream::usage(const Usage& usage) const {
  return chunk(head_, true, OrderedJson::array(), usage_json(usage));
}

std::string ChatStream::error(const ApiError& error) const {
  return sse_data(openai_error_body(error));
}

}  // namespace tessera::server::openai
