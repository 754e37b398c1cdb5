// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the model wrote -> reasoning, content and tool calls, as the text arrives.
//   [ reasoning </think> ] content [ \n\n <tool_calls> invokes </tool_calls> ] end token
// However the text is cut into parts, the events that come add up to the same strings. Nothing is taken back.
// Text that departs from the format gives the best reading, and a fault that says where it departs:
//   - calls inside the reasoning end it; a block opens without its empty line, too
//   - a parameter that isn't closed ends at the next tag; a value said to be JSON that isn't becomes a string
//   - a parameter that comes twice keeps its first value; a call without a name is dropped
//   - a block in which no call begins is content, unless the answer was cut off in it; what follows a block is dropped
//   - special tokens elsewhere stay in the text
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; docs/formats/chat.md.
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "text/utf8_joiner.h"

namespace tessera::text {

struct AnswerEvent {
  // kCallBegin: the text is the tool's name. kArguments: more of the call's JSON. kCallEnd: no text.
  enum class Kind { kReasoning, kContent, kCallBegin, kArguments, kCallEnd };
  Kind kind;
  std::string text;
};

struct ParsedCall {
  std::string name;
  // JSON text of an object, typed as the model typed it: strings from string="true", other values verbatim from
  // string="false". Only complete calls have a complete object.
  std::string arguments;
  bool is_complete = false;
};

struct Answer {
  std::string reasoning, content;
  std::vector<ParsedCall> calls;
  // The first departure from the format, in one line; empty for an answer that DeepSeek's own parser takes, too.
  std::string fault;
};

// kCutOff: the text ends because of a limit, not because the model ended it.
enum class Ending { kEndToken, kCutOff };

class AnswerParser {
 public:
  // As Prompt::starts_in_reasoning says. `must_call`: what follows the reasoning is held to be a block of calls, so the
  // beginning of one that was cut off is no content, however little of it there is.
  explicit AnswerParser(bool starts_in_reasoning, bool must_call = false)
      : state_(starts_in_reasoning ? State::kReasoning : State::kContent), must_call_(must_call) {}

  // `text` is part of the answer with its special tokens in it (Detokenizer::Special::kKeep), cut anywhere, even inside
  // a character. Work is linear in the text.
  std::vector<AnswerEvent> push(std::string_view text);
  // Once, at the end. `ending` does not matter where the text held the end token.
  std::vector<AnswerEvent> finish(Ending ending);
  // What has come so far; the fault is final after finish.
  const Answer& answer() const { return answer_; }
  // Whether what was pushed so far ends inside the reasoning.
  bool is_reasoning() const { return state_ == State::kReasoning; }

 private:
  enum class State {
    kReasoning,
    kContent,
    kBlock,
    kHeader,
    kParameterHeader,
    kValue,
    kAfterParameter,
    kAfterBlock,
    kDone
  };

  std::span<const std::string_view> markers() const;
  void advance();
  bool step();
  void use_up(size_t end);
  void on_marker(std::string_view skipped, std::string_view marker);
  void on_text_marker(std::string_view marker);
  void on_block_marker(std::string_view skipped, std::string_view marker);
  void on_header_end(std::string_view header, std::string_view marker);
  void on_parameter_header_end(std::string_view header, std::string_view marker);
  void on_value_end(std::string_view skipped, std::string_view marker);
  void leave_tag(std::string_view marker);
  void begin_parameter(std::string_view name);
  void stream(std::string_view text);
  void end_block(bool is_closed);
  void end_call();
  void end_text(std::string_view rest);

  void emit(AnswerEvent::Kind kind, std::string_view text);
  void note_fault(const std::string& fault);
  bool is_block_begun(std::string_view rest) const;
  bool is_in_block() const;
  bool is_streaming() const;

  State state_;
  bool must_call_;
  Answer answer_;
  std::vector<AnswerEvent> events_;
  Utf8Joiner joiner_;
  std::string pending_;  // text not yet used up, from at_
  size_t at_ = 0;
  size_t searched_ = 0;    // no marker begins before it
  std::string raw_block_;  // the block's text, until a call begins
  bool is_block_faulty_ = false;
  bool has_call_ = false;                       // the current call has a name
  bool is_string_ = false;                      // the current parameter's type
  bool is_dropped_ = false;                     // the current parameter is not shown
  std::string parameter_;                       // its name
  std::unordered_set<std::string> parameters_;  // names seen in the current call
};

}  // namespace tessera::text
