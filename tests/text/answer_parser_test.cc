// SPDX-License-Identifier: Apache-2.0
// The parser of answers: worked examples, DeepSeek's own parser, and the same result however the text is cut.
#include "text/chat/answer_parser.h"

#include <gtest/gtest.h>

#include "base/strings.h"
#include "testing/seed.h"
#include "text/chat/markers.h"
#include "text/chat/tool_text.h"
#include "text/chat_cases.h"

namespace tessera::text {
namespace {

// Compares every cutting with the whole text; returns the answer.
Answer parse_any_way(const std::string& text, bool is_thinking, std::mt19937& random,
                     Ending ending = Ending::kEndToken) {
  const Parsed whole = parse_whole(text, is_thinking, ending);
  const auto expect_same = [&](const Parsed& parts) {
    EXPECT_EQ(parts.events, whole.events) << text;
    EXPECT_EQ(parts.answer.fault, whole.answer.fault) << text;
    EXPECT_EQ(parts.answer.reasoning, whole.answer.reasoning) << text;
    EXPECT_EQ(parts.answer.content, whole.answer.content) << text;
    EXPECT_EQ(parts.answer.calls.size(), whole.answer.calls.size()) << text;
  };
  expect_same(parse_in_parts(text, is_thinking, ending, [] { return size_t{1}; }));
  for (const uint32_t most : {3u, 8u, 40u}) {
    expect_same(parse_in_parts(text, is_thinking, ending, [&] { return size_t{1} + random() % most; }));
  }
  return whole.answer;
}

void expect_answer(const Answer& answer, const JsonCursor& expected) {
  EXPECT_EQ(answer.fault, "");
  EXPECT_EQ(answer.reasoning, expected.at("reasoning").string());
  EXPECT_EQ(answer.content, expected.at("content").string());
  const std::vector<JsonCursor> calls = expected.at("tool_calls").elements();
  ASSERT_EQ(answer.calls.size(), calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(answer.calls[i].name, calls[i].at("name").string());
    EXPECT_EQ(answer.calls[i].arguments, calls[i].at("arguments").string());
    EXPECT_TRUE(answer.calls[i].is_complete);
  }
}

TEST(AnswerParser, WorkedExamples) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const Json json = Json::parse_python(read_golden("chat-vectors.json"), "vectors");
  int count = 0;
  for (const JsonCursor& item : JsonCursor(json, "vectors").at("parse").elements()) {
    SCOPED_TRACE(item.at("name").string());
    for (int i = 0; i < 50; ++i)
      expect_answer(parse_any_way(item.at("text").string(), item.at("thinking").boolean(), random), item);
    ++count;
  }
  EXPECT_EQ(count, 5);
}

TEST(AnswerParser, AgreesWithDeepSeeksParser) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::vector<Json> cases = reference_cases("parse");
  EXPECT_GE(cases.size(), 60u);
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const JsonCursor item(cases[i], "case");
    const std::string& text = item.at("text").string();
    const Answer answer = parse_any_way(text, item.at("thinking").boolean(), random);
    // DeepSeek's parser wants the end token in the text; here the engine may say that there was one.
    if (text.find(kEosToken) == std::string::npos) continue;
    if (const auto expected = item.find("answer")) {
      expect_answer(answer, *expected);
    } else {
      EXPECT_NE(answer.fault, "") << text;
    }
  }
}

// Pieces of markup in any order: no cutting changes the result, complete arguments are JSON, faults are one line.
TEST(AnswerParser, AnyTextAnyCuts) {
  const std::string pieces[] = {"\n\n<\uFF5CDSML\uFF5Ctool_calls",
                                ">\n",
                                "\n",
                                "<\uFF5CDSML\uFF5Cinvoke name=\"f\">\n",
                                "<\uFF5CDSML\uFF5Cinvoke",
                                "<\uFF5CDSML\uFF5Cparameter name=\"a\" string=\"true\">",
                                "<\uFF5CDSML\uFF5Cparameter name=\"b\" string=\"false\">",
                                "</\uFF5CDSML\uFF5Cparameter>\n",
                                "</\uFF5CDSML\uFF5Cinvoke>\n",
                                "</\uFF5CDSML\uFF5Ctool_calls>",
                                "</think>",
                                "<think>",
                                "[1]",
                                "\"",
                                "\u4e2d",
                                "\xff",
                                "\xe4\xb8",
                                "<",
                                "x",
                                std::string(kEosToken)};
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int num_calls = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    for (uint32_t left = random() % 24; left > 0; --left) {
      // The end token is rare, or nothing would come after it.
      const size_t piece = random() % std::size(pieces);
      if (piece + 1 < std::size(pieces) || random() % 4 == 0) text += pieces[piece];
    }
    if (random() % 3 == 0) text.resize(random() % (text.size() + 1));
    const Ending ending = random() % 2 == 0 ? Ending::kEndToken : Ending::kCutOff;
    const Answer answer = parse_any_way(text, random() % 2 == 0, random, ending);
    EXPECT_TRUE(is_valid_utf8(answer.reasoning + answer.content));
    EXPECT_EQ(answer.fault.find('\n'), std::string::npos);
    for (const ParsedCall& call : answer.calls) {
      if (!call.is_complete) continue;
      EXPECT_EQ(Json::parse(call.arguments, "arguments").kind(), Json::Kind::kObject) << text;
      ++num_calls;
    }
  }
  EXPECT_GT(num_calls, 50);
}

// What the encoder writes for calls, the parser reads back: names, keys and typed values.
TEST(AnswerParser, ReadsWhatTheEncoderWrites) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string values[] = {"1",
                                "-2.5",
                                "\"x\"",
                                "\"a\\n\\\"b\\u0001\"",
                                "[1, {\"k\": null}]",
                                "{}",
                                "true",
                                "123456789012345678901234567890",
                                "\"\u4e2d<\uFF5CDSML\""};
  for (int i = 0; i < 200; ++i) {
    std::vector<ToolCall> calls(1 + random() % 3);
    for (ToolCall& call : calls) {
      call.name = "tool\u00e9";
      for (uint32_t argument_idx = 0, count = random() % 4; argument_idx < count; ++argument_idx) {
        call.arguments += argument_idx == 0 ? "{" : ", ";
        call.arguments += "\"k" + std::to_string(argument_idx) + "\": " + values[random() % std::size(values)];
      }
      call.arguments += call.arguments.empty() ? "{}" : "}";
    }
    std::string text = "Why.</think>Here.\n\n";
    append_tool_calls(text, calls);
    text += kEosToken;
    const Answer answer = parse_any_way(text, true, random);
    EXPECT_EQ(answer.fault, "");
    EXPECT_EQ(answer.reasoning, "Why.");
    EXPECT_EQ(answer.content, "Here.");
    ASSERT_EQ(answer.calls.size(), calls.size());
    for (size_t call_idx = 0; call_idx < calls.size(); ++call_idx) {
      EXPECT_EQ(answer.calls[call_idx].name, calls[call_idx].name);
      EXPECT_EQ(answer.calls[call_idx].arguments, calls[call_idx].arguments);
    }
  }
}

std::string block(const std::string& inside) {
  return "\n\n<\uFF5CDSML\uFF5Ctool_calls>\n" + inside + "</\uFF5CDSML\uFF5Ctool_calls>";
}

TEST(AnswerParser, ReadsTextThatDeparts) {
  const std::string invoke = "<\uFF5CDSML\uFF5Cinvoke name=\"f\">\n", end_invoke = "</\uFF5CDSML\uFF5Cinvoke>\n";
  const std::string a = "<\uFF5CDSML\uFF5Cparameter name=\"a\" string=\"true\">",
                    b = "<\uFF5CDSML\uFF5Cparameter name=\"b\" string=\"false\">",
                    end = "</\uFF5CDSML\uFF5Cparameter>\n";
  struct Case {
    std::string text;
    bool is_thinking;
    std::string content, arguments, fault;  // arguments "none": no call
  };
  const Case cases[] = {
      {"Why" + block(invoke + end_invoke), true, "", "{}", "expected </think> before tool calls, found none"},
      {"Hi" + block(invoke + end_invoke).substr(1), false, "Hi", "{}", "expected an empty line"},
      {block(invoke + a + "x\n" + b + "1" + end + end_invoke), false, "", R"({"a": "x", "b": 1})",
       "parameter \"a\": expected its closing tag"},
      {block(invoke + a + "x\n" + end_invoke), false, "", R"({"a": "x"})", "parameter \"a\": expected its closing tag"},
      {block(invoke + a + "x\n"), false, "", R"({"a": "x"})", "parameter \"a\": expected its closing tag"},
      {block(invoke + b + "NaN" + end + end_invoke), false, "", R"({"b": "NaN"})",
       "parameter \"b\": expected JSON, found \"NaN\""},
      {block(invoke + b + "two words" + end + end_invoke), false, "", R"({"b": "two words"})",
       "parameter \"b\": expected JSON"},
      {block(invoke + a + "x" + end + a + "y" + end + end_invoke), false, "", R"({"a": "x"})",
       "parameter \"a\": expected once, found twice"},
      {block(invoke + end_invoke) + "\nMore", false, "", "{}",
       "expected nothing after the tool calls, found \"\\x0aMore\""},
      {block("<\uFF5CDSML\uFF5Cinvoke>\n" + end_invoke), false, block("<\uFF5CDSML\uFF5Cinvoke>\n" + end_invoke),
       "none", "tool call: expected name="},
      {"Hi\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinv", false,
       "Hi\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinv", "none", "expected the end of the tool calls"},
      {"Hi </think> there", false, "Hi </think> there", "none", "content: expected no special token, found </think>"},
      {"Hi\n\n", false, "Hi\n\n", "none", ""},
      {"Hi\n\n<\uFF5CDSML", false, "Hi\n\n<\uFF5CDSML", "none", ""},
  };
  std::mt19937 random(1);
  for (const Case& item : cases) {
    const Answer answer = parse_any_way(item.text, item.is_thinking, random);
    EXPECT_EQ(answer.content, item.content) << item.text;
    EXPECT_EQ(answer.calls.empty() ? "none" : answer.calls[0].arguments, item.arguments) << item.text;
    EXPECT_TRUE(answer.fault.starts_with(item.fault) && answer.fault.empty() == item.fault.empty()) << answer.fault;
  }
}

TEST(AnswerParser, ACutOffCallStaysOpen) {
  AnswerParser parser(false);
  parser.push("\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinvoke name=\"f\">\n");
  parser.push("<\uFF5CDSML\uFF5Cparameter name=\"a\" string=\"true\">half");
  const std::vector<AnswerEvent> events = parser.finish(Ending::kCutOff);
  EXPECT_TRUE(events.empty());
  ASSERT_EQ(parser.answer().calls.size(), 1u);
  EXPECT_EQ(parser.answer().calls[0].arguments, "{\"a\": \"half");
  EXPECT_FALSE(parser.answer().calls[0].is_complete);
  EXPECT_NE(parser.answer().fault, "");
}

// The markup of calls is no content where only the limit kept a call from beginning.
TEST(AnswerParser, ABlockThatIsCutOffIsNotContent) {
  const std::string block = "\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinvoke name=\"f";
  for (size_t length = 3; length <= block.size(); ++length) {
    AnswerParser parser(false);
    parser.push("Yes." + block.substr(0, length));
    parser.finish(Ending::kCutOff);
    const bool has_markup = block.substr(0, length).find(kDsmlToken) != std::string::npos;
    EXPECT_EQ(parser.answer().content, has_markup ? "Yes." : "Yes." + replace_invalid_utf8(block.substr(0, length)));
    EXPECT_EQ(parser.answer().fault.empty(), !has_markup) << length;
  }
  // Where calls must come, not even its first character is.
  for (size_t length = 1; length <= block.size(); ++length) {
    if (replace_invalid_utf8(block.substr(0, length)) != block.substr(0, length)) continue;  // within a character
    AnswerParser parser(true, true);
    parser.push("Hm.</think>" + block.substr(0, length));
    parser.finish(Ending::kCutOff);
    EXPECT_EQ(parser.answer().content, "") << length;
    EXPECT_EQ(parser.answer().reasoning, "Hm.");
    EXPECT_NE(parser.answer().fault, "");
  }
  AnswerParser ended(false);  // by the model: its text, such as it is
  ended.push("Yes." + block);
  ended.finish(Ending::kEndToken);
  EXPECT_EQ(ended.answer().content, "Yes." + block);
}

// Nothing that is safe to show waits.
TEST(AnswerParser, ShowsTextAtOnce) {
  AnswerParser parser(true);
  EXPECT_EQ(parser.push("think")[0].text, "think");
  EXPECT_TRUE(parser.push("</th").empty());
  EXPECT_EQ(parser.push("ing")[0].text, "</thing");
  const std::vector<AnswerEvent> events = parser.push(" on</think>Hi\n");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].text, " on");
  EXPECT_EQ(events[1].kind, AnswerEvent::Kind::kContent);
  EXPECT_EQ(events[1].text, "Hi");
  EXPECT_EQ(parser.push("there")[0].text, "\nthere");
  EXPECT_TRUE(parser.finish(Ending::kEndToken).empty());
  EXPECT_EQ(parser.answer().content, "Hi\nthere");
  EXPECT_EQ(parser.answer().fault, "");
}

}  // namespace
}  // namespace tessera::text
