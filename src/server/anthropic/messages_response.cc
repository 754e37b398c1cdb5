// SPDX-License-Identifier: Apache-2.0
#include "server/anthropic/messages_response.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "server/json_text.h"
#include "server/sse.h"

namespace tessera::server::anthropic {

namespace {

using OrderedJson = nlohmann::ordered_json;

std::string dumped(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string event(const std::string& type, const OrderedJson& fields) {
  OrderedJson out = {{"type", type}};
  out.update(fields);
  return sse_event(type, dumped(out));
}

OrderedJson usage_json(const Usage& usage) {
  return {{"input_tokens", usage.num_prompt_tokens - usage.num_cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", usage.num_cached_tokens},
          {"output_tokens", usage.num_completion_tokens}};
}

OrderedJson message_json(const std::string& id, const std::string& model, OrderedJson stop_reason,
                         OrderedJson stop_sequence, const Usage& usage) {
  OrderedJson out = {{"id", id}, {"type", "message"}, {"role", "assistant"}, {"model", model}};
  out["content"] = OrderedJson::array();
  out["stop_reason"] = std::move(stop_reason);
  out["stop_sequence"] = std::move(stop_sequence);
  out["usage"] = usage_json(usage);
  return out;
}

std::string_view stop_reason(const FinishedAnswer& answer) {
  if (!answer.stop_string.empty()) return "stop_sequence";
  switch (answer.reason) {
    case FinishReason::kStop:
      break;
    case FinishReason::kLength:
      return "max_tokens";
    case FinishReason::kToolCalls:
      return "tool_use";
  }
  return "end_turn";
}

OrderedJson stop_sequence(const FinishedAnswer& answer) {
  return answer.stop_string.empty() ? OrderedJson() : OrderedJson(answer.stop_string);
}

OrderedJson thinking_block(const std::string& text, std::string_view signature) {
  return {{"type", "thinking"}, {"thinking", text}, {"signature", signature}};
}

OrderedJson text_block(const std::string& text) {
  return {{"type", "text"}, {"text", text}};
}

OrderedJson call_block(const std::string& id, const std::string& name) {
  return {{"type", "tool_use"}, {"id", id}, {"name", name}};
}

}  // namespace

std::string render_message(const std::string& id, const std::string& model, const FinishedAnswer& answer,
                           const Usage& usage) {
  std::string blocks;
  const auto add = [&](const std::string& block) { blocks += (blocks.empty() ? "" : ",") + block; };
  if (!answer.reasoning.empty()) add(dumped(thinking_block(answer.reasoning, kSignature)));
  if (!answer.content.empty()) add(dumped(text_block(answer.content)));
  for (const AnswerCall& call : answer.calls) {
    if (!call.is_complete) continue;
    add(with_members(dumped(call_block(call.id, call.name)), "{\"input\":" + call.arguments + "}"));
  }
  std::string message = dumped(message_json(id, model, stop_reason(answer), stop_sequence(answer), usage));
  // Inside a string every quote has a backslash before it, so this is the member.
  constexpr std::string_view kEmpty = "\"content\":[]";
  return message.insert(message.find(kEmpty) + kEmpty.size() - 1, blocks);
}

std::string render_count(int64_t num_tokens) {
  return dumped({{"input_tokens", num_tokens}});
}

std::string MessageStream::begin(const Usage& usage) {
  return event("message_start", {{"message", message_json(id_, model_, nullptr, nullptr, usage)}});
}

std::string MessageStream::open(Block block, const CallDelta* call) {
  std::string out = close();
  block_ = block;
  OrderedJson json;
  switch (block) {
    case Block::kThinking:
      json = thinking_block("", "");
      break;
    case Block::kCall:
      json = call_block(call->id, call->name);
      json["input"] = OrderedJson::object();
      break;
    case Block::kText:
    case Block::kNone:
      json = text_block("");
      break;
  }
  return out + event("content_block_start", {{"index", num_blocks_++}, {"content_block", json}});
}

std::string MessageStream::close() {
  if (block_ == Block::kNone) return "";
  const int index = num_blocks_ - 1;
  std::string out;
  if (block_ == Block::kThinking) {
    out += event("content_block_delta",
                 {{"index", index}, {"delta", {{"type", "signature_delta"}, {"signature", kSignature}}}});
  }
  block_ = Block::kNone;
  return out + event("content_block_stop", {{"index", index}});
}

std::string MessageStream::delta(const AnswerDelta& delta) {
  std::string out;
  const auto add = [&](Block block, const CallDelta* call, const OrderedJson& json, bool begins) {
    if (begins || block_ != block) out += open(block, call);
    out += event("content_block_delta", {{"index", num_blocks_ - 1}, {"delta", json}});
  };
  if (!delta.reasoning.empty()) {
    add(Block::kThinking, nullptr, {{"type", "thinking_delta"}, {"thinking", delta.reasoning}}, false);
  }
  if (!delta.content.empty()) add(Block::kText, nullptr, {{"type", "text_delta"}, {"text", delta.content}}, false);
  for (const CallDelta& call : delta.calls) {
    if (!call.begins && call.arguments.empty()) continue;
    add(Block::kCall, &call, {{"type", "input_json_delta"}, {"partial_json", call.arguments}}, call.begins);
  }
  return out;
}

std::string MessageStream::ping() {
  return event("ping", OrderedJson::object());
}

std::string MessageStream::end(const AnswerDelta& last, const FinishedAnswer& answer, const Usage& usage) {
  const OrderedJson reason = {{"stop_reason", stop_reason(answer)}, {"stop_sequence", stop_sequence(answer)}};
  std::string out = delta(last);
  out += close();
  out += event("message_delta", {{"delta", reason}, {"usage", usage_json(usage)}});
  return out + event("message_stop", OrderedJson::object());
}

std::string MessageStream::error(const ApiError& error) {
  return sse_event("error", anthropic_error_body(error));
}

}  // namespace tessera::server::anthropic
