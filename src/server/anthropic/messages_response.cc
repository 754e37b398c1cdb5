// SPDX-License-Identifier: Apache-2.0
#include "server/anthropic/messages_response.h"

#include <string_view>
#include <utility>

#include "server/json_text.h"
#include "server/sse.h"

namespace tessera::server::anthropic {

namespace {

std::string event(std::string_view type, const JsonObject& fields = {}) {
  return sse_event(type, JsonObject{{"type", type}}.add_members_of(fields.text()).text());
}

JsonObject usage_json(const Usage& usage) {
  return {{"input_tokens", usage.num_prompt_tokens - usage.num_cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", usage.num_cached_tokens},
          {"output_tokens", usage.num_completion_tokens}};
}

JsonObject message_json(const std::string& id, const std::string& model, const JsonArray& content,
                        const JsonText& stop_reason, const JsonText& stop_sequence, const Usage& usage) {
  return {{"id", id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", model},
          {"content", content},
          {"stop_reason", stop_reason},
          {"stop_sequence", stop_sequence},
          {"usage", usage_json(usage)}};
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

JsonObject thinking_block(const std::string& text, std::string_view signature) {
  return {{"type", "thinking"}, {"thinking", text}, {"signature", signature}};
}

JsonObject text_block(const std::string& text) {
  return {{"type", "text"}, {"text", text}};
}

// `input`: JSON text.
JsonObject call_block(const std::string& id, const std::string& name, std::string input) {
  return {{"type", "tool_use"}, {"id", id}, {"name", name}, {"input", JsonText::raw(std::move(input))}};
}

}  // namespace

std::string render_message(const std::string& id, const std::string& model, const FinishedAnswer& answer,
                           const Usage& usage) {
  JsonArray blocks;
  if (!answer.reasoning.empty()) blocks.add(thinking_block(answer.reasoning, kSignature));
  if (!answer.content.empty()) blocks.add(text_block(answer.content));
  for (const AnswerCall& call : answer.calls) {
    if (call.is_complete) blocks.add(call_block(call.id, call.name, call.arguments));
  }
  return message_json(id, model, blocks, stop_reason(answer), JsonText::or_null(answer.stop_string), usage).text();
}

std::string render_count(int64_t num_tokens) {
  return JsonObject{{"input_tokens", num_tokens}}.text();
}

std::string MessageStream::begin(const Usage& usage) {
  return event("message_start", {{"message", message_json(id_, model_, {}, nullptr, nullptr, usage)}});
}

std::string MessageStream::open(Block block, const CallDelta* call) {
  std::string out = close();
  block_ = block;
  JsonObject json;
  switch (block) {
    case Block::kThinking:
      json = thinking_block("", "");
      break;
    case Block::kCall:
      json = call_block(call->id, call->name, "{}");
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
    const JsonObject signature{{"type", "signature_delta"}, {"signature", kSignature}};
    out += event("content_block_delta", {{"index", index}, {"delta", signature}});
  }
  block_ = Block::kNone;
  return out + event("content_block_stop", {{"index", index}});
}

std::string MessageStream::delta(const AnswerDelta& delta) {
  std::string out;
  const auto add = [&](Block block, const CallDelta* call, const JsonObject& json, bool begins) {
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
  return event("ping");
}

std::string MessageStream::end(const AnswerDelta& last, const FinishedAnswer& answer, const Usage& usage) {
  const JsonObject reason{{"stop_reason", stop_reason(answer)},
                          {"stop_sequence", JsonText::or_null(answer.stop_string)}};
  std::string out = delta(last);
  out += close();
  out += event("message_delta", {{"delta", reason}, {"usage", usage_json(usage)}});
  return out + event("message_stop");
}

std::string MessageStream::error(const ApiError& error) {
  return sse_event("error", anthropic_error_body(error));
}

}  // namespace tessera::server::anthropic
