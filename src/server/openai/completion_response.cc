// SPDX-License-Identifier: Apache-2.0
#include "server/openai/completion_response.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/strings.h"
#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson body_json(const AnswerHead& head) {
  OrderedJson out = {{"id", head.id}, {"object", "text_completion"}, {"created", head.created}, {"model", head.model}};
  if (!head.fingerprint.empty()) out["system_fingerprint"] = head.fingerprint;
  return out;
}

// Characters that begin in these bytes, so that the parts of a character split over tokens count once.
size_t num_characters(const std::string& bytes) {
  return static_cast<size_t>(std::count_if(
      bytes.begin(), bytes.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

// The parallel lists of the old form; `offset` is moved past the tokens.
OrderedJson logprobs_json(std::span<const TokenLogprob> tokens, size_t& offset) {
  OrderedJson texts = OrderedJson::array(), logprobs = texts, tops = texts, offsets = texts;
  for (const TokenLogprob& token : tokens) {
    texts.push_back(replace_invalid_utf8(token.token.bytes));
    logprobs.push_back(logprob_json(token.token.logprob));
    OrderedJson top = OrderedJson::object();
    for (const TokenChoice& other : token.top) {
      // Tokens that are parts of characters may look the same; the likeliest stands for them.
      const std::string text = replace_invalid_utf8(other.bytes);
      if (!top.contains(text)) top[text] = logprob_json(other.logprob);
    }
    if (!token.top.empty() && !top.contains(texts.back().get<std::string>())) {
      top[texts.back().get<std::string>()] = logprobs.back();
    }
    tops.push_back(top.empty() ? OrderedJson() : top);
    offsets.push_back(offset);
    offset += num_characters(token.token.bytes);
  }
  return {{"tokens", texts}, {"token_logprobs", logprobs}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

OrderedJson choice_json(size_t choice_idx, const std::string& text, OrderedJson logprobs, OrderedJson reason) {
  OrderedJson out = {{"index", choice_idx}, {"text", text}};
  out["logprobs"] = std::move(logprobs);
  out["finish_reason"] = std::move(reason);
  return out;
}

}  // namespace

std::string render_completion(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                              bool has_logprobs) {
  OrderedJson out = body_json(head), list = OrderedJson::array();
  for (const FinishedAnswer& answer : choices) {
    size_t offset = 0;
    list.push_back(choice_json(list.size(), answer.content,
                               has_logprobs ? logprobs_json(answer.content_logprobs, offset) : OrderedJson(),
                               to_string(answer.reason)));
  }
  out["choices"] = std::move(list);
  out["usage"] = usage_json(usage);
  return dumped(out);
}

std::string CompletionStream::delta(int choice_idx, const AnswerDelta& delta) {
  if (delta.content.empty() && (!has_logprobs_ || delta.content_logprobs.empty())) return "";
  OrderedJson out = body_json(head_), logprobs;
  if (has_logprobs_) logprobs = logprobs_json(delta.content_logprobs, offsets_[choice_idx]);
  out["choices"] = OrderedJson::array({choice_json(static_cast<size_t>(choice_idx), delta.content, logprobs, nullptr)});
  if (has_usage_) out["usage"] = nullptr;
  return sse_data(dumped(out));
}

std::string CompletionStream::end(int choice_idx, const AnswerDelta& last, FinishReason reason) {
  OrderedJson out = body_json(head_), logprobs;
  if (has_logprobs_ && !last.content_logprobs.empty()) {
    logprobs = logprobs_json(last.content_logprobs, offsets_[choice_idx]);
  }
  out["choices"] =
      OrderedJson::array({choice_json(static_cast<size_t>(choice_idx), last.content, logprobs, to_string(reason))});
  if (has_usage_) out["usage"] = nullptr;
  return sse_data(dumped(out));
}

std::string CompletionStream::usage(const Usage& usage) const {
  OrderedJson out = body_json(head_);
  out["choices"] = OrderedJson::array();
  out["usage"] = usage_json(usage);
  return sse_data(dumped(out));
}

std::string CompletionStream::error(const ApiError& error) const {
  return sse_data(openai_error_body(error));
}

}  // namespace tessera::server::openai
