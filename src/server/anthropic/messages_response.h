// SPDX-License-Identifier: Apache-2.0
#pragma once
// Answers of POST /v1/messages: whole, and as a stream of named events.
//   message_start, { content_block_start, content_block_delta..., content_block_stop }, message_delta, message_stop
// Thinking blocks carry a signature that says nothing: no two servers could check each other's, and nothing here is
// kept secret from its client. A call that the answer's end cut off is left out of the whole answer, as its input is
// not JSON; a stream has begun it by then. Source: API reference of Anthropic's messages and of its streaming events.
#include <string>
#include <string_view>

#include "server/answer.h"
#include "server/api_error.h"

namespace tessera::server::anthropic {

inline constexpr std::string_view kSignature = "unsigned";

// The body. The answer has one choice; its calls' ids begin with toolu_ (AnswerOptions::call_id_prefix).
std::string render_message(const std::string& id, const std::string& model, const FinishedAnswer& answer,
                           const Usage& usage);

// {"input_tokens"}.
std::string render_count(int64_t num_tokens);

// Events of the stream. In order: begin, any number of deltas and pings, end; or an error, which nothing follows.
class MessageStream {
 public:
  MessageStream(std::string id, std::string model) : id_(std::move(id)), model_(std::move(model)) {}

  // `usage` as far as it is known: the prompt's.
  std::string begin(const Usage& usage);
  // "" for an empty delta.
  std::string delta(const AnswerDelta& delta);
  static std::string ping();
  // `last` is what finish() of the assembler gave, `answer` what it then holds.
  std::string end(const AnswerDelta& last, const FinishedAnswer& answer, const Usage& usage);
  static std::string error(const ApiError& error);

 private:
  enum class Block { kNone, kThinking, kText, kCall };

  std::string open(Block block, const CallDelta* call);
  std::string close();

  std::string id_, model_;
  Block block_ = Block::kNone;
  int num_blocks_ = 0;
};

}  // namespace tessera::server::anthropic
