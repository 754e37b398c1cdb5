// SPDX-License-Identifier: Apache-2.0
#include "server/answer.h"

#include <utility>

namespace tessera::server {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kToolCalls:
      return "tool_calls";
  }
  return "";
}

bool AnswerDelta::is_empty() const {
  return reasoning.empty() && content.empty() && calls.empty() && reasoning_logprobs.empty() &&
         content_logprobs.empty();
}

AnswerAssembler::AnswerAssembler(AnswerOptions options, IdSource& ids)
    : options_(std::move(options)),
      ids_(&ids),
      parser_(options_.starts_in_reasoning, options_.must_call),
      stops_(options_.stops) {}

AnswerDelta AnswerAssembler::push(std::string_view bytes, const TokenLogprob* logprob) {
  AnswerDelta delta;
  const bool is_reasoning = options_.is_chat && parser_.is_reasoning();
  ++answer_.num_tokens;
  if (is_reasoning) ++answer_.num_reasoning_tokens;
  if (has_stopped_) return delta;
  add_logprob(logprob, is_reasoning, delta);
  answer_.sampled_text += bytes;
  if (options_.is_chat) {
    take(parser_.push(bytes), delta);
  } else {
    take_content(joiner_.push(bytes), delta);
  }
  return delta;
}

AnswerDelta AnswerAssembler::push_echo(std::string_view bytes, const TokenLogprob* logprob) {
  AnswerDelta delta;
  add_logprob(logprob, false, delta);
  delta.content = joiner_.push(bytes);
  answer_.content += delta.content;
  return delta;
}

AnswerDelta AnswerAssembler::finish(Ending ending) {
  AnswerDelta delta;
  if (!has_stopped_) {
    if (options_.is_chat) {
      // A stop at the model's end token is the format's end, whether the token's text was pushed or not.
      const bool is_cut = ending != Ending::kEndToken;
      take(parser_.finish(is_cut ? text::Ending::kCutOff : text::Ending::kEndToken), delta);
    } else {
      take_content(joiner_.finish(), delta);
    }
    end_content(delta);
  }
  answer_.parse_fault = options_.is_chat ? parser_.answer().fault : "";
  answer_.stop_string = stops_.matched();
  if (!answer_.stop_string.empty()) {
    answer_.reason = FinishReason::kStop;
  } else if (ending == Ending::kLength && !has_stopped_) {
    answer_.reason = FinishReason::kLength;
  } else {
    // A call that the model left open is not one that can be made.
    const bool calls = !answer_.calls.empty() && answer_.calls.front().is_complete;
    answer_.reason = calls ? FinishReason::kToolCalls : FinishReason::kStop;
  }
  return delta;
}

void AnswerAssembler::take(const std::vector<text::AnswerEvent>& events, AnswerDelta& delta) {
  using Kind = text::AnswerEvent::Kind;
  for (const text::AnswerEvent& event : events) {
    if (has_stopped_) return;
    switch (event.kind) {
      case Kind::kReasoning:
        delta.reasoning += event.text;
        answer_.reasoning += event.text;
        break;
      case Kind::kContent:
        take_content(event.text, delta);
        break;
      case Kind::kCallBegin: {
        end_content(delta);
        const std::string id = ids_->next(options_.call_id_prefix);
        delta.calls.push_back({answer_.calls.size(), true, false, id, event.text, ""});
        answer_.calls.push_back({id, event.text, "", false});
        break;
      }
      case Kind::kArguments:
      case Kind::kCallEnd: {
        const size_t index = answer_.calls.size() - 1;
        if (delta.calls.empty() || delta.calls.back().index != index) {
          delta.calls.push_back({index, false, false, "", "", ""});
        }
        delta.calls.back().arguments += event.text;
        answer_.calls.back().arguments += event.text;
        if (event.kind == Kind::kArguments) break;
        delta.calls.back().ends = answer_.calls.back().is_complete = true;
        has_stopped_ = !options_.allows_parallel_calls;
        break;
      }
    }
  }
}

void AnswerAssembler::take_content(std::string_view text, AnswerDelta& delta) {
  const std::string safe = stops_.push(text);
  delta.content += safe;
  answer_.content += safe;
  has_stopped_ = stops_.has_matched();
}

// No more content comes: what might have become a stop string is content.
void AnswerAssembler::end_content(AnswerDelta& delta) {
  const std::string held = stops_.finish();
  delta.content += held;
  answer_.content += held;
}

void AnswerAssembler::add_logprob(const TokenLogprob* logprob, bool is_reasoning, AnswerDelta& delta) {
  if (!options_.keeps_logprobs || logprob == nullptr) return;
  (is_reasoning ? delta.reasoning_logprobs : delta.content_logprobs).push_back(*logprob);
  (is_reasoning ? answer_.reasoning_logprobs : answer_.content_logprobs).push_back(*logprob);
}

void Usage::add(const FinishedAnswer& answer) {
  num_completion_tokens += answer.num_tokens;
  num_reasoning_tokens += answer.num_reasoning_tokens;
}

}  // namespace tessera::server
