// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tests of the chat format share.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "testing/goldens.h"
#include "text/chat/answer_parser.h"

namespace tessera::text {

inline std::string read_golden(const std::string& name) {
  std::ifstream file(testing::golden_path(name));
  EXPECT_TRUE(file.is_open()) << name;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The cases of one kind in chat-reference.jsonl.
inline std::vector<Json> reference_cases(const std::string& kind) {
  std::vector<Json> cases;
  std::ifstream file(testing::golden_path("chat-reference.jsonl"));
  for (std::string line; std::getline(file, line);) {
    Json json = Json::parse_python(line, "case");
    if (json.find("kind")->string() == kind) cases.push_back(std::move(json));
  }
  return cases;
}

// An answer and its events, strung together by kind: what must not depend on how the text was cut.
struct Parsed {
  Answer answer;
  std::string events;
};

inline void add_events(std::string& out, const std::vector<AnswerEvent>& events, AnswerEvent::Kind& last) {
  static const char* const kNames[] = {"R:", "C:", "B:", "A:", "E:"};
  for (const AnswerEvent& event : events) {
    const bool is_marker = event.kind == AnswerEvent::Kind::kCallBegin || event.kind == AnswerEvent::Kind::kCallEnd;
    if (is_marker || event.kind != last) out += std::string("\n") + kNames[static_cast<int>(event.kind)];
    out += event.text;
    last = event.kind;
  }
}

// `cuts` decides how many bytes each part has.
template <class Cuts>
Parsed parse_in_parts(const std::string& text, bool is_thinking, Ending ending, const Cuts& cuts) {
  AnswerParser parser(is_thinking);
  Parsed parsed;
  AnswerEvent::Kind last = AnswerEvent::Kind::kCallEnd;
  for (size_t pos = 0; pos < text.size();) {
    const std::string part = text.substr(pos, cuts());
    add_events(parsed.events, parser.push(part), last);
    pos += part.size();
  }
  add_events(parsed.events, parser.finish(ending), last);
  parsed.answer = parser.answer();
  return parsed;
}

inline Parsed parse_whole(const std::string& text, bool is_thinking, Ending ending = Ending::kEndToken) {
  return parse_in_parts(text, is_thinking, ending, [&] { return text.size(); });
}

}  // namespace tessera::text
