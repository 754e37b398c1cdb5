// SPDX-License-Identifier: Apache-2.0
#include "server/openai/completion_response.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/strings.h"
#include "server/openai/json_parts.h"
#include "server/sse.h"

namespace tessera::server::openai {

namespace {

JsonObject body_json(const AnswerHead& head) {
  JsonObject out{{"id", head.id}, {"object", "text_completion"}, {"created", head.created}, {"model", head.model}};
  if (!head.fingerprint.empty()) out.add("system_fingerprint", head.fingerprint);
  return out;
}

// Characters that begin in these bytes, so that the parts of a character split over tokens count once.
size_t num_characters(const std::string& bytes) {
  return static_cast<size_t>(std::count_if(
      bytes.begin(), bytes.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

// A token's likeliest by their text, and itself. Tokens that are parts of characters may look the same; the likeliest
// stands for them.
JsonText top_logprobs_json(const TokenLogprob& token) {
  if (token.top.empty()) return nullptr;
  JsonObject out;
  std::set<std::string> seen;
  const auto add = [&](const TokenChoice& choice) {
    const auto [text, is_new] = seen.insert(replace_invalid_utf8(choice.bytes));
    if (is_new) out.add(*text, logprob_json(choice.logprob));
  };
  for (const TokenChoice& other : token.top) add(other);
  add(token.token);
  return out;
}

// The parallel lists of the old form; `offset` is moved past the tokens.
JsonObject logprobs_json(std::span<const TokenLogprob> tokens, size_t& offset) {
  JsonArray texts, logprobs, tops, offsets;
  for (const TokenLogprob& token : tokens) {
    texts.add(token.token.bytes);
    logprobs.add(logprob_json(token.token.logprob));
    tops.add(top_logprobs_json(token));
    offsets.add(offset);
    offset += num_characters(token.token.bytes);
  }
  return {{"tokens", texts}, {"token_logprobs", logprobs}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

JsonObject choice_json(size_t choice_idx, const std::string& text, const JsonText& logprobs, const JsonText& reason) {
  return {{"index", choice_idx}, {"text", text}, {"logprobs", logprobs}, {"finish_reason", reason}};
}

// A chunk of a stream with one choice.
std::string chunk(const AnswerHead& head, bool has_usage, const JsonObject& choice) {
  JsonObject out = body_json(head).add("choices", JsonArray{choice});
  if (has_usage) out.add("usage", nullptr);
  return sse_data(out.text());
}

}  // namespace

std::string render_completion(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                              bool has_logprobs) {
  JsonArray list;
  for (const FinishedAnswer& answer : choices) {
    size_t offset = 0;
    JsonText logprobs;
    if (has_logprobs) logprobs = logprobs_json(answer.content_logprobs, offset);
    list.add(choice_json(list.size(), answer.content, logprobs, to_string(answer.reason)));
  }
  return body_json(head).add("choices", list).add("usage", usage_json(usage)).text();
}

std::string CompletionStream::delta(int choice_idx, const AnswerDelta& delta) {
  if (delta.content.empty() && (!has_logprobs_ || delta.content_logprobs.empty())) return "";
  JsonText logprobs;
  if (has_logprobs_) logprobs = logprobs_json(delta.content_logprobs, offsets_[choice_idx]);
  return chunk(head_, has_usage_, choice_json(static_cast<size_t>(choice_idx), delta.content, logprobs, nullptr));
}

std::string CompletionStream::end(int choice_idx, const AnswerDelta& last, FinishReason reason) {
  JsonText logprobs;
  if (has_logprobs_ && !last.content_logprobs.empty()) {
    logprobs = logprobs_json(last.content_logprobs, offsets_[choice_idx]);
  }
  return chunk(head_, has_usage_,
               choice_json(static_cast<size_t>(choice_idx), last.content, logprobs, to_string(reason)));
}

std::string CompletionStream::usage(const Usage& usage) const {
  return sse_data(body_json(head_).add("choices", JsonArray()).add("usage", usage_json(usage)).text());
}

std::string CompletionStream::error(const ApiError& error) const {
  return sse_data(openai_error_body(error));
}

}  // namespace tessera::server::openai
