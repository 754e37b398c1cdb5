// SPDX-License-Identifier: Apache-2.0
#pragma once
// Answers of POST /v1/responses: whole, and as a stream of named events, of which the last holds the whole answer.
//   created, in_progress, { item added, { part added, deltas, part done }, item done }, completed or incomplete
// Source: API reference of OpenAI's responses and of its streaming events.
#include <cstdint>
#include <string>
#include <string_view>

#include "server/json_text.h"
#include "server/openai/chat_response.h"

namespace tessera::server::openai {

// The body. `repeated` is ResponsesRequest::repeated. The answer has one choice.
std::string render_response(const AnswerHead& head, const std::string& repeated, const FinishedAnswer& answer,
                            const Usage& usage, bool has_logprobs);

// Events of the stream. In order: begin, any number of deltas, end; or an error at any time, which nothing follows.
class ResponsesStream {
 public:
  ResponsesStream(AnswerHead head, std::string repeated, bool has_logprobs)
      : head_(std::move(head)), repeated_(std::move(repeated)), has_logprobs_(has_logprobs) {}

  std::string begin();
  // "" for an empty delta.
  std::string delta(const AnswerDelta& delta);
  // `last` is what finish() of the assembler gave, `answer` what it then holds.
  std::string end(const AnswerDelta& last, const FinishedAnswer& answer, const Usage& usage);
  std::string error(const ApiError& error);

 private:
  enum class Item { kNone, kReasoning, kMessage, kCall };

  std::string event(std::string_view type, const JsonObject& fields);
  JsonObject place() const;
  std::string open(Item item, const CallDelta* call);
  std::string close();
  std::string text(Item item, const std::string& text, const std::vector<TokenLogprob>& logprobs);
  std::string call(const CallDelta& call);

  AnswerHead head_;
  std::string repeated_;
  bool has_logprobs_;
  int64_t sequence_ = 0;
  Item item_ = Item::kNone;
  size_t item_idx_ = 0;  // of the open item
  size_t num_items_ = 0;
  FinishedAnswer so_far_;  // what the open item holds: reasoning, content or its one call
  std::vector<TokenLogprob> waiting_;
};

}  // namespace tessera::server::openai
