// SPDX-License-Identifier: Apache-2.0
#pragma once
// Answers of POST /v1/completions: whole, and as a stream of chunks.
// Source: API reference of OpenAI's completions.
#include <map>
#include <span>
#include <string>

#include "server/openai/chat_response.h"

namespace tessera::server::openai {

// The body. Choices are in the order of their indices: prompt by prompt.
std::string render_completion(const AnswerHead& head, std::span<const FinishedAnswer> choices, const Usage& usage,
                              bool has_logprobs);

// Lines of the stream, as ChatStream's. A choice needs no beginning.
class CompletionStream {
 public:
  CompletionStream(AnswerHead head, bool has_logprobs, bool has_usage)
      : head_(std::move(head)), has_logprobs_(has_logprobs), has_usage_(has_usage) {}

  // "" for an empty delta.
  std::string delta(int choice_idx, const AnswerDelta& delta);
  std::string end(int choice_idx, const AnswerDelta& last, FinishReason reason);
  std::string usage(const Usage& usage) const;
  std::string error(const ApiError& error) const;

 private:
  AnswerHead head_;
  bool has_logprobs_, has_usage_;
  std::map<int, size_t> offsets_;  // per choice: characters of the tokens so far
};

}  // namespace tessera::server::openai
