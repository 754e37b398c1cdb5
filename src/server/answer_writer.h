// SPDX-License-Identifier: Apache-2.0
#pragma once
// One interface over the four APIs' answers, so that whoever runs a request need not know which one asked.
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "server/answer.h"
#include "server/api_error.h"
#include "server/openai/chat_response.h"

namespace tessera::server {

enum class ErrorStyle { kOpenai, kAnthropic };
// The body of an error.
std::string error_body(ErrorStyle style, const ApiError& error);

// Of one request; used by one thread.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;
  // The whole answer's body; choices in the order of their indices.
  virtual std::string whole(std::span<const FinishedAnswer> choices, const Usage& usage) = 0;

  // Lines of a stream, in order: begin, deltas and an end of each choice, done; or an error, which nothing follows.
  // `usage` as far as it is known.
  virtual std::string begin(int num_choices, const Usage& usage) = 0;
  // Whether begin() tells the usage, and so waits until it is known how much of the prompt need not be run.
  virtual bool begins_with_usage() const { return false; }
  // "" for an empty delta.
  virtual std::string delta(int choice_idx, const AnswerDelta& delta) = 0;
  // `last` is what finish() of the assembler gave, `answer` what it then holds.
  virtual std::string end(int choice_idx, const AnswerDelta& last, const FinishedAnswer& answer) = 0;
  virtual std::string done(const Usage& usage) = 0;
  virtual std::string error(const ApiError& error) = 0;
  // What is sent while nothing else is.
  virtual std::string keep_alive() const = 0;
};

std::unique_ptr<AnswerWriter> chat_writer(openai::AnswerHead head, bool has_logprobs, bool has_usage);
std::unique_ptr<AnswerWriter> completion_writer(openai::AnswerHead head, bool has_logprobs, bool has_usage);
// `repeated` is ResponsesRequest::repeated.
std::unique_ptr<AnswerWriter> responses_writer(openai::AnswerHead head, std::string repeated, bool has_logprobs);
std::unique_ptr<AnswerWriter> message_writer(std::string id, std::string model);

}  // namespace tessera::server
