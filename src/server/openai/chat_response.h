// SPDX-License-Identifier: Apache-2.0
#pragma once
// Answers of POST /v1/chat/completions: whole, and as a stream of chunks. The chunks of a choice add up to the whole
// answer; a chunk is sent as soon as it has something to say.
// Source: API reference of OpenAI's chat completions; reasoning_content as DeepSeek's service has it.
#include <cstdint>
#include <span>
#include <string>

#include "server/answer.h"
#include "server/api_error.h"

namespace tessera::server::openai {

// What all parts of an answer repeat.
struct AnswerHead {
  std::string id;
  std::string model;
  int64_t created = 0;      // seconds since 1970
  std::string fingerprint;  // of model, precision and program: equal ones give equal answers to equal seeds
};

// The body. Choices are in the order of their indices.
std::string render_chat(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                        bool has_logprobs);

// Lines of the stream, each complete. In order: for each choice begin, any number of deltas, end; then usage where it
// was asked for; then kSseDone. Instead of all that still would come, an error may be sent: nothing follows it.
class ChatStream {
 public:
  ChatStream(AnswerHead head, bool has_logprobs, bool has_usage)
      : head_(std::move(head)), has_logprobs_(has_logprobs), has_usage_(has_usage) {}

  std::string begin(int choice_idx) const;
  // "" for an empty delta.
  std::string delta(int choice_idx, const AnswerDelta& delta) const;
  // `last` is what finish() of the assembler gave.
  std::string end(int choice_idx, const AnswerDelta& last, FinishReason reason) const;
  std::string usage(const Usage& usage) const;
  std::string error(const ApiError& error) const;

 private:
  AnswerHead head_;
  bool has_logprobs_, has_usage_;
};

}  // namespace tessera::server::openai
