// SPDX-License-Identifier: Apache-2.0
#include "server/openai/responses_response.h"

#include <fmt/format.h>

#include <utility>

#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

// Items are named after the response, so that a stream and its whole answer name them alike.
std::string item_id(std::string_view prefix, const AnswerHead& head, size_t item_idx) {
  const size_t mark = head.id.find('_');
  return fmt::format("{}_{}_{}", prefix, mark == std::string::npos ? head.id : head.id.substr(mark + 1), item_idx);
}

JsonObject text_part(const std::string& text, const JsonArray& logprobs) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", JsonArray()}, {"logprobs", logprobs}};
}

JsonObject reasoning_item(const AnswerHead& head, size_t item_idx, const JsonArray& content, std::string_view status) {
  return {{"id", item_id("rs", head, item_idx)},
          {"type", "reasoning"},
          {"summary", JsonArray()},
          {"content", content},
          {"status", status}};
}

JsonObject reasoning_part(const std::string& text) {
  return {{"type", "reasoning_text"}, {"text", text}};
}

JsonObject message_item(const AnswerHead& head, size_t item_idx, const JsonArray& content, std::string_view status) {
  return {{"id", item_id("msg", head, item_idx)},
          {"type", "message"},
          {"role", "assistant"},
          {"status", status},
          {"content", content}};
}

JsonObject call_item(const AnswerHead& head, size_t item_idx, const AnswerCall& call, std::string_view status) {
  return {{"id", item_id("fc", head, item_idx)}, {"type", "function_call"}, {"call_id", call.id}, {"name", call.name},
          {"arguments", call.arguments},         {"status", status}};
}

JsonObject usage_of(const Usage& usage) {
  return {{"input_tokens", usage.num_prompt_tokens},
          {"input_tokens_details", JsonObject{{"cached_tokens", usage.num_cached_tokens}, {"cache_write_tokens", 0}}},
          {"output_tokens", usage.num_completion_tokens},
          {"output_tokens_details", JsonObject{{"reasoning_tokens", usage.num_reasoning_tokens}}},
          {"total_tokens", usage.num_prompt_tokens + usage.num_completion_tokens}};
}

std::string_view status_of(const FinishedAnswer& answer) {
  return answer.reason == FinishReason::kLength ? "incomplete" : "completed";
}

JsonArray logprobs_or_none(const std::vector<TokenLogprob>& logprobs, bool has_logprobs) {
  return has_logprobs ? token_logprobs_json(logprobs) : JsonArray();
}

JsonArray output_of(const AnswerHead& head, const FinishedAnswer& answer, bool has_logprobs) {
  JsonArray output;
  if (!answer.reasoning.empty()) {
    output.add(reasoning_item(head, 0, {reasoning_part(answer.reasoning)}, "completed"));
  }
  const bool has_message = !answer.content.empty() || answer.calls.empty();
  // What was cut off is what stands last.
  if (has_message) {
    const JsonObject part = text_part(answer.content, logprobs_or_none(answer.content_logprobs, has_logprobs));
    output.add(message_item(head, output.size(), {part}, answer.calls.empty() ? status_of(answer) : "completed"));
  }
  for (const AnswerCall& call : answer.calls) {
    output.add(call_item(head, output.size(), call, call.is_complete ? "completed" : "incomplete"));
  }
  return output;
}

// `repeated`: JSON text of an object, whose members are the last ones.
std::string response_text(const AnswerHead& head, std::string_view status, const JsonText& incomplete_details,
                          const JsonArray& output, const JsonText& usage, const std::string& repeated) {
  JsonObject out{{"id", head.id},       {"object", "response"}, {"created_at", head.created},
                 {"status", status},    {"error", nullptr},     {"incomplete_details", incomplete_details},
                 {"model", head.model}, {"output", output},     {"previous_response_id", nullptr},
                 {"store", false},      {"background", false},  {"truncation", "disabled"},
                 {"usage", usage}};
  return out.add_members_of(repeated).text();
}

std::string finished_text(const AnswerHead& head, const std::string& repeated, const FinishedAnswer& answer,
                          const Usage& usage, bool has_logprobs) {
  JsonText details;
  if (answer.reason == FinishReason::kLength) details = JsonObject{{"reason", "max_output_tokens"}};
  return response_text(head, status_of(answer), details, output_of(head, answer, has_logprobs), usage_of(usage),
                       repeated);
}

JsonObject response_field(std::string response) {
  return {{"response", JsonText::raw(std::move(response))}};
}

}  // namespace

std::string render_response(const AnswerHead& head, const std::string& repeated, const FinishedAnswer& answer,
                            const Usage& usage, bool has_logprobs) {
  return finished_text(head, repeated, answer, usage, has_logprobs);
}

// `fields` follow type and number.
std::string ResponsesStream::event(std::string_view type, const JsonObject& fields) {
  JsonObject out{{"type", type}, {"sequence_number", sequence_++}};
  return sse_event(type, out.add_members_of(fields.text()).text());
}

std::string ResponsesStream::begin() {
  const JsonObject response = response_field(response_text(head_, "in_progress", nullptr, {}, nullptr, repeated_));
  std::string out = event("response.created", response);
  out += event("response.in_progress", response);
  return out;
}

std::string ResponsesStream::open(Item item, const CallDelta* call) {
  std::string out = close();
  item_ = item;
  item_idx_ = num_items_++;
  so_far_ = FinishedAnswer{};
  JsonObject json;
  if (item == Item::kReasoning) {
    json = reasoning_item(head_, item_idx_, {}, "in_progress");
  } else if (item == Item::kMessage) {
    json = message_item(head_, item_idx_, {}, "in_progress");
  } else {
    so_far_.calls.push_back({call->id, call->name, "", false});
    json = call_item(head_, item_idx_, so_far_.calls.back(), "in_progress");
  }
  out += event("response.output_item.added", {{"output_index", item_idx_}, {"item", json}});
  if (item == Item::kCall) return out;
  const JsonObject part = item == Item::kReasoning ? reasoning_part("") : text_part("", {});
  return out + event("response.content_part.added", place().add("content_index", 0).add("part", part));
}

// The open item's.
JsonObject ResponsesStream::place() const {
  const std::string_view prefix = item_ == Item::kCall ? "fc" : item_ == Item::kMessage ? "msg" : "rs";
  return {{"item_id", item_id(prefix, head_, item_idx_)}, {"output_index", item_idx_}};
}

std::string ResponsesStream::close() {
  if (item_ == Item::kNone) return "";
  std::string out;
  JsonObject item;
  if (item_ == Item::kCall) {
    const AnswerCall& call = so_far_.calls.back();
    item = call_item(head_, item_idx_, call, call.is_complete ? "completed" : "incomplete");
    out +=
        event("response.function_call_arguments.done", place().add("name", call.name).add("arguments", call.arguments));
  } else {
    const bool is_text = item_ == Item::kMessage;
    const std::string& text = is_text ? so_far_.content : so_far_.reasoning;
    const JsonArray logprobs = logprobs_or_none(so_far_.content_logprobs, has_logprobs_);
    const JsonObject part = is_text ? text_part(text, logprobs) : reasoning_part(text);
    const std::string_view status = is_text ? status_of(so_far_) : "completed";
    item = is_text ? message_item(head_, item_idx_, {part}, status) : reasoning_item(head_, item_idx_, {part}, status);
    JsonObject done = place().add("content_index", 0).add("text", text);
    if (is_text) done.add("logprobs", logprobs);
    out += event(is_text ? "response.output_text.done" : "response.reasoning_text.done", done);
    out += event("response.content_part.done", place().add("content_index", 0).add("part", part));
  }
  out += event("response.output_item.done", {{"output_index", item_idx_}, {"item", item}});
  item_ = Item::kNone;
  return out;
}

std::string ResponsesStream::text(Item item, const std::string& text, const std::vector<TokenLogprob>& logprobs) {
  const bool is_text = item == Item::kMessage;
  std::string out = item_ == item ? "" : open(item, nullptr);
  (is_text ? so_far_.content : so_far_.reasoning) += text;
  if (is_text && has_logprobs_) {
    so_far_.content_logprobs.insert(so_far_.content_logprobs.end(), logprobs.begin(), logprobs.end());
  }
  JsonObject fields = place().add("content_index", 0).add("delta", text);
  if (is_text) fields.add("logprobs", logprobs_or_none(logprobs, has_logprobs_));
  return out + event(is_text ? "response.output_text.delta" : "response.reasoning_text.delta", fields);
}

std::string ResponsesStream::call(const CallDelta& call) {
  std::string out = call.begins ? open(Item::kCall, &call) : "";
  AnswerCall& now = so_far_.calls.back();
  now.arguments += call.arguments;
  now.is_complete = call.ends;
  if (!call.arguments.empty()) {
    out += event("response.function_call_arguments.delta", place().add("delta", call.arguments));
  }
  return out;
}

std::string ResponsesStream::delta(const AnswerDelta& delta) {
  std::string out;
  if (!delta.reasoning.empty()) out += text(Item::kReasoning, delta.reasoning, {});
  // Log probabilities whose text is held back wait for it; those of calls' markup belong to no text.
  if (has_logprobs_) {
    waiting_.insert(waiting_.end(), delta.content_logprobs.begin(), delta.content_logprobs.end());
  }
  if (!delta.content.empty() || (item_ == Item::kMessage && !waiting_.empty())) {
    out += text(Item::kMessage, delta.content, std::exchange(waiting_, {}));
  }
  for (const CallDelta& part : delta.calls) out += call(part);
  return out;
}

std::string ResponsesStream::end(const AnswerDelta& last, const FinishedAnswer& answer, const Usage& usage) {
  std::string out = delta(last);
  if (answer.content.empty() && answer.calls.empty()) out += open(Item::kMessage, nullptr);
  so_far_.reason = answer.reason;
  out += close();
  const bool is_cut = answer.reason == FinishReason::kLength;
  return out + event(is_cut ? "response.incomplete" : "response.completed",
                     response_field(finished_text(head_, repeated_, answer, usage, has_logprobs_)));
}

std::string ResponsesStream::error(const ApiError& error) {
  return event(
      "error",
      {{"code", JsonText::or_null(error.code)}, {"message", error.message}, {"param", JsonText::or_null(error.param)}});
}

}  // namespace tessera::server::openai
