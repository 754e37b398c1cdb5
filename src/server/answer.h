// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sampled tokens -> what the APIs show of an answer: reasoning, content, tool calls with ids, log probabilities, and
// how it ended. One assembler per choice; nothing that was given out is taken back.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/ids.h"
#include "text/chat/answer_parser.h"
#include "text/stop_matcher.h"

namespace tessera::server {

// A token and the log probability (natural) that the model gave it. The bytes may be part of a character.
struct TokenChoice {
  std::string bytes;
  double logprob = 0;
  int32_t id = 0;
};

struct TokenLogprob {
  TokenChoice token;
  std::vector<TokenChoice> top;  // the likeliest ones, best first
};

// Why no more tokens came.
enum class Ending {
  kEndToken,  // the model ended its answer
  kStopped,   // because has_stopped()
  kLength,    // max_tokens, or the context's end
};

// As OpenAI names them: stop, length, tool_calls.
enum class FinishReason { kStop, kLength, kToolCalls };
std::string_view to_string(FinishReason reason);

struct CallDelta {
  size_t index = 0;
  bool begins = false;  // id and name are set
  bool ends = false;    // the arguments are complete
  std::string id, name;
  std::string arguments;  // more of the arguments' JSON text
};

// What one or more tokens add. Reasoning stands before content, content before calls.
struct AnswerDelta {
  std::string reasoning, content;
  std::vector<CallDelta> calls;
  std::vector<TokenLogprob> reasoning_logprobs, content_logprobs;
  bool is_empty() const;
};

struct AnswerCall {
  std::string id, name, arguments;
  bool is_complete = false;
};

// The whole answer: the sum of its deltas.
struct FinishedAnswer {
  std::string reasoning, content;
  std::vector<AnswerCall> calls;
  std::vector<TokenLogprob> reasoning_logprobs, content_logprobs;
  FinishReason reason = FinishReason::kStop;
  std::string stop_string;  // the one that ended the answer; empty: none
  int64_t num_tokens = 0;   // sampled, the end token included
  int64_t num_reasoning_tokens = 0;
  std::string sampled_text;  // all of it with its markup; the end token only where its text was pushed
  std::string parse_fault;   // where the text departs from the chat format (text::Answer::fault)
};

struct AnswerOptions {
  bool is_chat = true;  // else the text is content as it comes (/v1/completions)
  bool starts_in_reasoning = false;
  bool must_call = false;  // a grammar holds the answer to calls
  bool allows_parallel_calls = true;
  bool keeps_logprobs = false;
  std::vector<std::string> stops;
  std::string_view call_id_prefix = "call_";
};

class AnswerAssembler {
 public:
  // `ids` must outlive it.
  AnswerAssembler(AnswerOptions options, IdSource& ids);

  // One more token. `logprob` may be null. After has_stopped() tokens are counted and nothing is shown.
  AnswerDelta push(std::string_view bytes, const TokenLogprob* logprob = nullptr);
  // Text that was not sampled now but belongs to the answer: an echoed prompt. Not counted, not looked through for
  // stops; only where the answer is not chat.
  AnswerDelta push_echo(std::string_view bytes, const TokenLogprob* logprob = nullptr);
  // A stop string came, or the one call that is allowed has ended: sample no more.
  bool has_stopped() const { return has_stopped_; }
  // Once, at the end: what still waited.
  AnswerDelta finish(Ending ending);
  // The whole answer; complete after finish.
  const FinishedAnswer& answer() const { return answer_; }

 private:
  void take(const std::vector<text::AnswerEvent>& events, AnswerDelta& delta);
  void take_content(std::string_view text, AnswerDelta& delta);
  void end_content(AnswerDelta& delta);
  void add_logprob(const TokenLogprob* logprob, bool is_reasoning, AnswerDelta& delta);

  AnswerOptions options_;
  IdSource* ids_;
  text::AnswerParser parser_;
  text::Utf8Joiner joiner_;  // of text that is not chat
  text::StopMatcher stops_;
  bool has_stopped_ = false;
  FinishedAnswer answer_;
};

// Tokens of a request over all its choices.
struct Usage {
  int64_t num_prompt_tokens = 0;
  int64_t num_cached_tokens = 0;  // of the prompt, that were not computed again
  int64_t num_completion_tokens = 0;
  int64_t num_reasoning_tokens = 0;  // of the completion
  void add(const FinishedAnswer& answer);
};

}  // namespace tessera::server
