// SPDX-License-Identifier: Apache-2.0
#include "text/chat/answer_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "text/chat/markers.h"
#include "text/chat/python_json.h"
#include "text/marker_search.h"

namespace tessera::text {

namespace {

// What ends each state. The end token is one everywhere: generation stops at it.
constexpr std::string_view kBlockOpening = "\n\n<\uFF5CDSML\uFF5Ctool_calls";
constexpr std::string_view kReasoningMarkers[] = {kEndThinkToken, kBlockOpening, kBlockOpening.substr(1), kToolCallsTag,
                                                  kEosToken};
constexpr std::string_view kContentMarkers[] = {kBlockOpening, kBlockOpening.substr(1), kToolCallsTag, kEosToken};
constexpr std::string_view kBlockMarkers[] = {kInvokeTag, kEndToolCallsTag, kEosToken};
constexpr std::string_view kInvokeMarkers[] = {kParameterTag, kEndInvokeTag, kEndToolCallsTag, kEosToken};
constexpr std::string_view kStringHeaderEnd = "\" string=\"true\">", kJsonHeaderEnd = "\" string=\"false\">";
constexpr std::string_view kParameterHeaderMarkers[] = {
    kStringHeaderEnd, kJsonHeaderEnd, kParameterTag, kEndParameterTag, kEndInvokeTag, kEndToolCallsTag, kEosToken};
// Tags inside a value count only with what must follow them, and take the line end before them along.
constexpr std::string_view kNextParameter = "\n<\uFF5CDSML\uFF5Cparameter name=\"";
constexpr std::string_view kNextEndInvoke = "\n</\uFF5CDSML\uFF5Cinvoke>";
constexpr std::string_view kNextEndToolCalls = "\n</\uFF5CDSML\uFF5Ctool_calls>";
constexpr std::string_view kValueMarkers[] = {
    kEndParameterTag,         kNextParameter,    kNextParameter.substr(1),    kNextEndInvoke,
    kNextEndInvoke.substr(1), kNextEndToolCalls, kNextEndToolCalls.substr(1), kEosToken};
constexpr std::string_view kEndMarkers[] = {kEosToken};

// The tag that a marker of kValueMarkers holds: a part of `marker`.
std::string_view tag_of(std::string_view marker) {
  if (marker.starts_with('\n')) marker.remove_prefix(1);
  for (const std::string_view tag : {kParameterTag, kEndInvokeTag}) {
    if (marker.starts_with(tag)) return marker.substr(0, tag.size());
  }
  return marker;
}

std::string quoted(std::string_view text) {
  return fmt::format("\"{}\"", printable(text, 60));
}

// As Python's \s, which DeepSeek's parser allows before a name.
bool is_space(char32_t c) {
  static constexpr std::u32string_view kOthers = U" \u0085\u00A0\u1680\u2028\u2029\u202F\u205F\u3000";
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F) || (c >= 0x2000 && c <= 0x200A) ||
         kOthers.find(c) != std::u32string_view::npos;
}

// The name in ` name="NAME">`, which ends in one or two line ends.
std::optional<std::string_view> strict_call_name(std::string_view header) {
  size_t begin = 0;
  for (size_t next = 0; next < header.size() && is_space(next_code_point(header, next));) begin = next;
  header.remove_prefix(begin);
  constexpr std::string_view kOpening = "name=\"";
  if (!header.starts_with(kOpening)) return std::nullopt;
  header.remove_prefix(kOpening.size());
  for (const std::string_view closing : {"\">\n\n", "\">\n"}) {
    if (header.ends_with(closing)) return header.substr(0, header.size() - closing.size());
  }
  return std::nullopt;
}

// What follows name=" up to the next quote, or to the end.
std::optional<std::string_view> any_name(std::string_view header) {
  constexpr std::string_view kOpening = "name=\"";
  const size_t begin = header.find(kOpening);
  if (begin == std::string_view::npos) return std::nullopt;
  header.remove_prefix(begin + kOpening.size());
  return header.substr(0, header.find('"'));
}

bool is_finite(const Json& value) {
  if (value.kind() == Json::Kind::kDouble) return std::isfinite(value.number());
  return std::all_of(value.array().begin(), value.array().end(), is_finite) &&
         std::all_of(value.object().begin(), value.object().end(),
                     [](const Json::Member& member) { return is_finite(member.second); });
}

// Whether other programs can read it: NaN is JSON for Python only.
bool is_json(std::string_view text) {
  try {
    return is_finite(Json::parse_python(text, "value"));
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::vector<AnswerEvent> AnswerParser::push(std::string_view text) {
  pending_ += joiner_.push(text);
  advance();
  return std::exchange(events_, {});
}

std::vector<AnswerEvent> AnswerParser::finish(Ending ending) {
  pending_ += joiner_.finish();
  advance();
  if (state_ == State::kReasoning && ending == Ending::kEndToken) note_fault("expected </think>, found the end");
  if (state_ != State::kDone) {
    const std::string_view rest = std::string_view(pending_).substr(at_);
    use_up(pending_.size());
    if (ending == Ending::kCutOff && is_block_begun(rest)) {
      note_fault("expected tool calls, found the beginning of their block");
      state_ = State::kDone;
    } else {
      end_text(rest);
    }
  }
  for (const std::string_view token : {kBosToken, kThinkToken, kEndThinkToken, kDsmlToken}) {
    for (const std::string* text : {&answer_.reasoning, &answer_.content}) {
      if (text->find(token) == std::string::npos) continue;
      note_fault(fmt::format("{}: expected no special token, found {}",
                             text == &answer_.content ? "content" : "reasoning", token));
    }
  }
  return std::exchange(events_, {});
}

// Whether the answer ends inside a block of calls before a call has begun, with nothing wrong so far: the markup of a
// call that was cut off is nobody's content.
bool AnswerParser::is_block_begun(std::string_view rest) const {
  if (is_in_block()) return answer_.calls.empty() && !is_block_faulty_;
  if (must_call_ && state_ == State::kContent && answer_.content.empty()) return !rest.empty();
  const bool is_text = state_ == State::kReasoning || state_ == State::kContent;
  return is_text && rest.find(kDsmlToken) != std::string_view::npos;  // held back: a marker as far as it goes
}

std::span<const std::string_view> AnswerParser::markers() const {
  switch (state_) {
    case State::kReasoning:
      return kReasoningMarkers;
    case State::kContent:
      return kContentMarkers;
    case State::kBlock:
      return kBlockMarkers;
    case State::kHeader:
    case State::kAfterParameter:
      return kInvokeMarkers;
    case State::kParameterHeader:
      return kParameterHeaderMarkers;
    case State::kValue:
      return kValueMarkers;
    case State::kAfterBlock:
    case State::kDone:
      break;
  }
  return kEndMarkers;
}

void AnswerParser::advance() {
  while (step()) {
  }
  pending_.erase(0, at_);
  searched_ -= at_;
  at_ = 0;
}

// Uses up text to the next marker. False where more text is needed.
bool AnswerParser::step() {
  const std::string_view pending = pending_;
  if (state_ == State::kDone) {
    // The text is not shown: how much of it there is depends on how it was cut.
    if (at_ < pending.size()) note_fault("expected nothing after the end token, found more text");
    at_ = searched_ = pending.size();
    return false;
  }
  const auto hit = find_first_marker(pending, markers(), searched_);
  if (!hit) {
    searched_ = pending.size() - held_back(pending.substr(at_), markers());
    if (is_streaming()) {
      stream(pending.substr(at_, searched_ - at_));
      use_up(searched_);
    }
    return false;
  }
  const std::string_view marker = markers()[hit->marker_idx];
  const std::string_view skipped = pending.substr(at_, hit->pos - at_);
  size_t end = hit->pos + marker.size();
  // What must follow a tag is read again by the next state.
  if (state_ == State::kValue) {
    const std::string_view tag = tag_of(marker);
    end = hit->pos + static_cast<size_t>(tag.data() - marker.data()) + tag.size();
  }
  // The end token is not part of the block.
  use_up(marker == kEosToken ? hit->pos : end);
  at_ = searched_ = end;
  on_marker(skipped, marker);
  return true;
}

// Moves on to `end`, keeping the text of a block in which no call has begun.
void AnswerParser::use_up(size_t end) {
  if (is_in_block() && answer_.calls.empty()) raw_block_ += std::string_view(pending_).substr(at_, end - at_);
  at_ = end;
}

void AnswerParser::on_marker(std::string_view skipped, std::string_view marker) {
  if (marker == kEosToken) {
    if (state_ == State::kReasoning) note_fault("expected </think>, found the end");
    return end_text(skipped);
  }
  switch (state_) {
    case State::kReasoning:
    case State::kContent:
      stream(skipped);
      return on_text_marker(marker);
    case State::kBlock:
      return on_block_marker(skipped, marker);
    case State::kHeader:
      return on_header_end(skipped, marker);
    case State::kParameterHeader:
      return on_parameter_header_end(skipped, marker);
    case State::kValue:
      return on_value_end(skipped, marker);
    case State::kAfterParameter:
      if (skipped != ">\n")
        note_fault(
            fmt::format("after parameter {}: expected \">\\x0a\", found {}", quoted(parameter_), quoted(skipped)));
      return leave_tag(marker);
    case State::kAfterBlock:
    case State::kDone:
      break;
  }
}

void AnswerParser::on_text_marker(std::string_view marker) {
  if (marker == kEndThinkToken) {
    state_ = State::kContent;
    return;
  }
  if (state_ == State::kReasoning) note_fault("expected </think> before tool calls, found none");
  if (marker != kBlockOpening) note_fault("expected an empty line before tool calls, found none");
  state_ = State::kBlock;
  raw_block_ = marker;
}

void AnswerParser::on_block_marker(std::string_view skipped, std::string_view marker) {
  if (skipped != ">\n") note_fault(fmt::format("between tool calls: expected \">\\x0a\", found {}", quoted(skipped)));
  if (marker == kEndToolCallsTag) return end_block(true);
  state_ = State::kHeader;
  has_call_ = false;
  parameters_.clear();
}

void AnswerParser::on_header_end(std::string_view header, std::string_view marker) {
  std::optional<std::string_view> name = strict_call_name(header);
  if (!name) {
    note_fault(fmt::format("tool call: expected name=\"...\">, found {}", quoted(header)));
    name = any_name(header);
  }
  if (name) {
    has_call_ = true;
    emit(AnswerEvent::Kind::kCallBegin, *name);
    raw_block_.clear();
  }
  leave_tag(marker);
}

void AnswerParser::on_parameter_header_end(std::string_view header, std::string_view marker) {
  if (marker != kStringHeaderEnd && marker != kJsonHeaderEnd) {
    note_fault(fmt::format("parameter: expected name=\"...\" string=\"true|false\">, found {}", quoted(header)));
    return leave_tag(marker);
  }
  constexpr std::string_view kOpening = " name=\"";
  std::optional<std::string_view> name;
  if (header.starts_with(kOpening)) {
    name = header.substr(kOpening.size());
  } else {
    note_fault(fmt::format("parameter: expected name=\"...\", found {}", quoted(header)));
    name = any_name(header);
  }
  parameter_ = name.value_or("");
  is_string_ = marker == kStringHeaderEnd;
  is_dropped_ = !has_call_ || !name;
  if (!is_dropped_ && !parameters_.insert(parameter_).second) {
    note_fault(fmt::format("parameter {}: expected once, found twice", quoted(parameter_)));
    is_dropped_ = true;
  }
  if (!is_dropped_ && is_string_) begin_parameter("\"");
  state_ = State::kValue;
}

// The key of the current parameter, and what its value begins with.
void AnswerParser::begin_parameter(std::string_view value) {
  const std::string_view separator = answer_.calls.back().arguments.empty() ? "{" : ", ";
  emit(AnswerEvent::Kind::kArguments, fmt::format("{}{}: {}", separator, json_quoted(parameter_), value));
}

void AnswerParser::on_value_end(std::string_view skipped, std::string_view marker) {
  if (is_string_) {
    stream(skipped);
    if (!is_dropped_) emit(AnswerEvent::Kind::kArguments, "\"");
  } else if (!is_dropped_) {
    const bool is_typed = is_json(skipped);
    if (!is_typed)
      note_fault(fmt::format("parameter {}: expected JSON, found {}", quoted(parameter_), quoted(skipped)));
    begin_parameter(is_typed ? std::string(skipped) : json_quoted(skipped));
  }
  if (marker != kEndParameterTag)
    note_fault(fmt::format("parameter {}: expected its closing tag, found another tag", quoted(parameter_)));
  leave_tag(tag_of(marker));
}

// Goes where a tag inside an invoke leads.
void AnswerParser::leave_tag(std::string_view marker) {
  if (marker == kParameterTag) {
    state_ = State::kParameterHeader;
  } else if (marker == kEndParameterTag) {
    state_ = State::kAfterParameter;
  } else if (marker == kEndInvokeTag) {
    end_call();
    state_ = State::kBlock;
  } else {
    note_fault("tool call: expected its closing tag, found the block's");
    end_call();
    end_block(true);
  }
}

// Text of the state that shows it as it comes.
void AnswerParser::stream(std::string_view text) {
  if (text.empty()) return;
  if (state_ == State::kReasoning) return emit(AnswerEvent::Kind::kReasoning, text);
  if (state_ == State::kContent) return emit(AnswerEvent::Kind::kContent, text);
  if (is_dropped_) return;
  std::string escaped;
  append_json_escaped(escaped, text);
  emit(AnswerEvent::Kind::kArguments, escaped);
}

void AnswerParser::end_call() {
  if (!has_call_) return;
  emit(AnswerEvent::Kind::kArguments, answer_.calls.back().arguments.empty() ? "{}" : "}");
  emit(AnswerEvent::Kind::kCallEnd, "");
  has_call_ = false;
}

void AnswerParser::end_block(bool is_closed) {
  state_ = State::kAfterBlock;
  if (answer_.calls.empty() && (!is_closed || is_block_faulty_)) emit(AnswerEvent::Kind::kContent, raw_block_);
}

// The end of the answer; `rest` is what stands before it.
void AnswerParser::end_text(std::string_view rest) {
  if (is_streaming()) stream(rest);
  if (is_in_block()) {
    note_fault("expected the end of the tool calls, found the end of the answer");
    end_block(false);
  } else if (state_ == State::kAfterBlock && !rest.empty()) {
    note_fault(fmt::format("expected nothing after the tool calls, found {}", quoted(rest)));
  }
  state_ = State::kDone;
}

void AnswerParser::emit(AnswerEvent::Kind kind, std::string_view text) {
  using Kind = AnswerEvent::Kind;
  switch (kind) {
    case Kind::kReasoning:
      answer_.reasoning += text;
      break;
    case Kind::kContent:
      answer_.content += text;
      break;
    case Kind::kCallBegin:
      answer_.calls.push_back({std::string(text), "", false});
      break;
    case Kind::kArguments:
      answer_.calls.back().arguments += text;
      break;
    case Kind::kCallEnd:
      answer_.calls.back().is_complete = true;
      break;
  }
  const bool is_marker = kind == Kind::kCallBegin || kind == Kind::kCallEnd;
  if (!is_marker && !events_.empty() && events_.back().kind == kind) {
    events_.back().text += text;
  } else {
    events_.push_back({kind, std::string(text)});
  }
}

void AnswerParser::note_fault(const std::string& fault) {
  if (answer_.fault.empty()) answer_.fault = fault;
  if (is_in_block()) is_block_faulty_ = true;
}

bool AnswerParser::is_in_block() const {
  return state_ >= State::kBlock && state_ <= State::kAfterParameter;
}

bool AnswerParser::is_streaming() const {
  return state_ == State::kReasoning || state_ == State::kContent || (state_ == State::kValue && is_string_);
}

}  // namespace tessera::text
