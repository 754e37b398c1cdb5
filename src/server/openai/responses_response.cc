// SPDX-License-Identifier: Apache-2.0
#include "server/openai/responses_response.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "server/json_text.h"
#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

using OrderedJson = nlohmann::ordered_json;

// Items are named after the response, so that a stream and its whole answer name them alike.
std::string item_id(std::string_view prefix, const AnswerHead& head, size_t item_idx) {
  const size_t mark = head.id.find('_');
  return fmt::format("{}_{}_{}", prefix, mark == std::string::npos ? head.id : head.id.substr(mark + 1), item_idx);
}

OrderedJson text_part(const std::string& text, const std::vector<TokenLogprob>& logprobs, bool has_logprobs) {
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", OrderedJson::array()},
          {"logprobs", has_logprobs ? token_logprobs_json(logprobs) : OrderedJson::array()}};
}

OrderedJson reasoning_item(const AnswerHead& head, size_t item_idx, const OrderedJson& content,
                           std::string_view status) {
  return {{"id", item_id("rs", head, item_idx)},
          {"type", "reasoning"},
          {"summary", OrderedJson::array()},
          {"content", content},
          {"status", status}};
}

OrderedJson reasoning_part(const std::string& text) {
  return {{"type", "reasoning_text"}, {"text", text}};
}

OrderedJson message_item(const AnswerHead& head, size_t item_idx, const OrderedJson& content, std::string_view status) {
  return {{"id", item_id("msg", head, item_idx)},
          {"type", "message"},
          {"role", "assistant"},
          {"status", status},
          {"content", content}};
}

OrderedJson call_item(const AnswerHead& head, size_t item_idx, const AnswerCall& call, std::string_view status) {
  return {{"id", item_id("fc", head, item_idx)}, {"type", "function_call"}, {"call_id", call.id}, {"name", call.name},
          {"arguments", call.arguments},         {"status", status}};
}

OrderedJson usage_of(const Usage& usage) {
  return {{"input_tokens", usage.num_prompt_tokens},
          {"input_tokens_details", {{"cached_tokens", usage.num_cached_tokens}, {"cache_write_tokens", 0}}},
          {"output_tokens", usage.num_completion_tokens},
          {"output_tokens_details", {{"reasoning_tokens", usage.num_reasoning_tokens}}},
          {"total_tokens", usage.num_prompt_tokens + usage.num_completion_tokens}};
}

std::string_view status_of(const FinishedAnswer& answer) {
  return answer.reason == FinishReason::kLength ? "incomplete" : "completed";
}

OrderedJson output_of(const AnswerHead& head, const FinishedAnswer& answer, bool has_logprobs) {
  OrderedJson output = OrderedJson::array();
  if (!answer.reasoning.empty()) {
    output.push_back(reasoning_item(head, 0, OrderedJson::array({reasoning_part(answer.reasoning)}), "completed"));
  }
  const bool has_message = !answer.content.empty() || answer.calls.empty();
  // What was cut off is what stands last.
  if (has_message) {
    output.push_back(message_item(
        head, output.size(), OrderedJson::array({text_part(answer.content, answer.content_logprobs, has_logprobs)}),
        answer.calls.empty() ? status_of(answer) : "completed"));
  }
  for (const AnswerCall& call : answer.calls) {
    output.push_back(call_item(head, output.size(), call, call.is_complete ? "completed" : "incomplete"));
  }
  return output;
}

OrderedJson response_json(const AnswerHead& head, std::string_view status) {
  OrderedJson out = {{"id", head.id}, {"object", "response"}, {"created_at", head.created}, {"status", status}};
  out["error"] = nullptr;
  out["incomplete_details"] = nullptr;
  out["model"] = head.model;
  out["output"] = OrderedJson::array();
  out["previous_response_id"] = nullptr;
  out["store"] = false;
  out["background"] = false;
  out["truncation"] = "disabled";
  out["usage"] = nullptr;
  return out;
}

std::string finished_text(const AnswerHead& head, const std::string& repeated, const FinishedAnswer& answer,
                          const Usage& usage, bool has_logprobs) {
  OrderedJson out = response_json(head, status_of(answer));
  if (answer.reason == FinishReason::kLength) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
  out["output"] = output_of(head, answer, has_logprobs);
  out["usage"] = usage_of(usage);
  return with_members(dumped(out), repeated);
}

std::string response_field(const std::string& response) {
  return "{\"response\":" + response + "}";
}

}  // namespace

std::string render_response(const AnswerHead& head, const std::string& repeated, const FinishedAnswer& answer,
                            const Usage& usage, bool has_logprobs) {
  return finished_text(head, repeated, answer, usage, has_logprobs);
}

// `fields`: JSON text of an object, whose members follow type and number.
std::string ResponsesStream::event(const std::string& type, const std::string& fields) {
  return sse_event(type, with_members(dumped({{"type", type}, {"sequence_number", sequence_++}}), fields));
}

std::string ResponsesStream::begin() {
  const std::string response = response_field(with_members(dumped(response_json(head_, "in_progress")), repeated_));
  std::string out = event("response.created", response);
  out += event("response.in_progress", response);
  return out;
}

std::string ResponsesStream::open(Item item, const CallDelta* call) {
  std::string out = close();
  item_ = item;
  item_idx_ = num_items_++;
  so_far_ = FinishedAnswer{};
  OrderedJson json;
  std::string id;
  const OrderedJson none = OrderedJson::array();
  if (item == Item::kReasoning) {
    json = reasoning_item(head_, item_idx_, none, "in_progress");
  } else if (item == Item::kMessage) {
    json = message_item(head_, item_idx_, none, "in_progress");
  } else {
    so_far_.calls.push_back({call->id, call->name, "", false});
    json = call_item(head_, item_idx_, so_far_.calls.back(), "in_progress");
  }
  out += event("response.output_item.added", dumped({{"output_index", item_idx_}, {"item", json}}));
  if (item == Item::kCall) return out;
  const OrderedJson part = item == Item::kReasoning ? reasoning_part("") : text_part("", {}, false);
  return out +
         event("response.content_part.added",
               dumped({{"item_id", json["id"]}, {"output_index", item_idx_}, {"content_index", 0}, {"part", part}}));
}

std::string ResponsesStream::close() {
  if (item_ == Item::kNone) return "";
  std::string out;
  OrderedJson item, place = {{"item_id", nullptr}, {"output_index", item_idx_}};
  if (item_ == Item::kCall) {
    const AnswerCall& call = so_far_.calls.back();
    item = call_item(head_, item_idx_, call, call.is_complete ? "completed" : "incomplete");
    place["item_id"] = item["id"];
    OrderedJson done = place;
    done["name"] = call.name;
    done["arguments"] = call.arguments;
    out += event("response.function_call_arguments.done", dumped(done));
  } else {
    const bool is_text = item_ == Item::kMessage;
    const OrderedJson part = is_text ? text_part(so_far_.content, so_far_.content_logprobs, has_logprobs_)
                                     : reasoning_part(so_far_.reasoning);
    const OrderedJson parts = OrderedJson::array({part});
    const std::string_view status = is_text ? status_of(so_far_) : "completed";
    item = is_text ? message_item(head_, item_idx_, parts, status) : reasoning_item(head_, item_idx_, parts, status);
    place["item_id"] = item["id"];
    place["content_index"] = 0;
    OrderedJson done = place;
    done["text"] = part["text"];
    if (is_text) done["logprobs"] = part["logprobs"];
    out += event(is_text ? "response.output_text.done" : "response.reasoning_text.done", dumped(done));
    place["part"] = part;
    out += event("response.content_part.done", dumped(place));
  }
  out += event("response.output_item.done", dumped({{"output_index", item_idx_}, {"item", item}}));
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
  OrderedJson fields = {{"item_id", item_id(is_text ? "msg" : "rs", head_, item_idx_)},
                        {"output_index", item_idx_},
                        {"content_index", 0},
                        {"delta", text}};
  if (is_text) fields["logprobs"] = has_logprobs_ ? token_logprobs_json(logprobs) : OrderedJson::array();
  return out + event(is_text ? "response.output_text.delta" : "response.reasoning_text.delta", dumped(fields));
}

std::string ResponsesStream::call(const CallDelta& call) {
  std::string out = call.begins ? open(Item::kCall, &call) : "";
  AnswerCall& now = so_far_.calls.back();
  now.arguments += call.arguments;
  now.is_complete = call.ends;
  if (!call.arguments.empty()) {
    out += event(
        "response.function_call_arguments.delta",
        dumped({{"item_id", item_id("fc", head_, item_idx_)}, {"output_index", item_idx_}, {"delta", call.arguments}}));
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
  const std::string response = finished_text(head_, repeated_, answer, usage, has_logprobs_);
  return out + event(is_cut ? "response.incomplete" : "response.completed", response_field(response));
}

std::string ResponsesStream::error(const ApiError& error) {
  const auto or_null = [](const std::string& text) { return text.empty() ? OrderedJson() : OrderedJson(text); };
  return event("error",
               dumped({{"code", or_null(error.code)}, {"message", error.message}, {"param", or_null(error.param)}}));
}

}  // namespace tessera::server::openai
