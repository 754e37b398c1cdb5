// SPDX-License-Identifier: Apache-2.0
// The chat encoder against worked examples, against DeepSeek's own, and on what it must refuse.
#include "text/chat/encode.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "testing/temporary_folder.h"
#include "text/chat/prompt.h"
#include "text/chat/python_json.h"
#include "text/chat/read_messages.h"
#include "text/chat_cases.h"

namespace tessera::text {
namespace {

std::string error_of(const auto& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line";
    return error.what();
  }
  return "no error";
}

std::string error_of_messages(const std::string& json) {
  return error_of([&] {
    const Json parsed = Json::parse_python(json, "request");
    const JsonCursor root(parsed, "request");
    read_messages(root.at("messages"), root.find("tools"));
  });
}

TEST(ChatEncode, WorkedExamples) {
  const Json json = Json::parse_python(read_golden("chat-vectors.json"), "vectors");
  const JsonCursor root(json, "vectors");
  int count = 0;
  for (const JsonCursor& item : root.at("render").elements()) {
    SCOPED_TRACE(item.at("name").string());
    ChatOptions options;
    options.thinking = item.at("thinking").boolean() ? Thinking::kOn : Thinking::kOff;
    if (const auto drop = item.find("drop_thinking")) options.drops_old_reasoning = drop->boolean();
    if (const auto effort = item.find("effort")) options.effort = effort_from_name(effort->string()).value();
    if (const auto table = item.find("effort_table"))
      options.effort_table = effort_table_from_name(table->string()).value();
    const std::vector<Message> messages = read_messages(item.at("messages"), item.find("tools"));
    check_answerable(messages);
    const Prompt prompt = render_chat(messages, options);
    EXPECT_EQ(prompt.text, item.at("expected").string());
    EXPECT_EQ(prompt.starts_in_reasoning, item.at("thinking").boolean());
    ++count;
  }
  EXPECT_EQ(count, 13);
  const JsonCursor effort = root.at("effort").elements().at(0);
  EXPECT_EQ(effort_text(Effort::kMax, EffortTable::kPreview), effort.at("A").string());
  EXPECT_EQ(effort_text(Effort::kMax, EffortTable::kOfficial), effort.at("B").string());
}

TEST(ChatEncode, EqualsDeepSeeksEncoder) {
  const std::vector<Json> cases = reference_cases("render");
  EXPECT_GE(cases.size(), 60u);
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const JsonCursor item(cases[i], "case");
    ChatOptions options;
    options.thinking = item.at("thinking").boolean() ? Thinking::kOn : Thinking::kOff;
    options.drops_old_reasoning = item.at("drop_thinking").boolean();
    if (const auto effort = item.find("effort")) options.effort = effort_from_name(effort->string()).value();
    EXPECT_EQ(render_chat(read_messages(item.at("messages")), options).text, item.at("prompt").string());
  }
}

TEST(ChatEncode, OneTurn) {
  EXPECT_EQ(render_user_turn({"", "Hi", Thinking::kOff}),
            "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C><\uFF5CUser\uFF5C>Hi<\uFF5CAssistant\uFF5C></think>");
  EXPECT_EQ(render_user_turn({"Be brief.", "Hi", Thinking::kOn}),
            "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>Be brief.<\uFF5CUser\uFF5C>Hi<\uFF5CAssistant\uFF5C><think>");
}

TEST(ChatEncode, ContinuesAnAssistantText) {
  const Json json = Json::parse_python(R"([{"role":"user","content":"Count"},
      {"role":"assistant","content":"one, tw","prefix":true}])",
                                       "request");
  const std::vector<Message> messages = read_messages(JsonCursor(json, "request", "messages"));
  check_answerable(messages);
  const Prompt chat = render_chat(messages, {});
  EXPECT_TRUE(chat.text.ends_with("<\uFF5CUser\uFF5C>Count<\uFF5CAssistant\uFF5C></think>one, tw"));
  ChatOptions options;
  options.thinking = Thinking::kOn;
  const Prompt thinking = render_chat(messages, options);
  EXPECT_TRUE(thinking.text.ends_with("<\uFF5CAssistant\uFF5C><think></think>one, tw"));
  EXPECT_FALSE(thinking.starts_in_reasoning);
}

TEST(ChatEncode, SampledCallsStandAsTheyAre) {
  std::vector<Message> messages(4);
  messages[1].role = Role::kAssistant;
  messages[1].content = "On it.";
  messages[1].tool_calls = {{"a", "f", "{}"}, {"b", "f", "{}"}};
  messages[1].sampled_calls = "\n\nas  sampled";
  messages[2].role = messages[3].role = Role::kTool;
  messages[2].tool_call_id = "b";
  messages[2].content = "2";
  messages[3].tool_call_id = "a";
  messages[3].content = "1";
  const std::string text = render_chat(messages, {}).text;
  // The calls still give the order of the results.
  EXPECT_NE(text.find("On it.\n\nas  sampled<\uFF5Cend\u2581of\u2581sentence\uFF5C><\uFF5CUser\uFF5C>"
                      "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>"),
            std::string::npos)
      << text;
  messages[1].sampled_calls = "\xff";
  EXPECT_THROW(render_chat(messages, {}), Error);
}

TEST(ChatEncode, UserPartsJoin) {
  const Json json = Json::parse_python(
      R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])", "request");
  EXPECT_TRUE(render_chat(read_messages(JsonCursor(json, "request", "messages")), {})
                  .text.ends_with("<\uFF5CUser\uFF5C>a\n\nb<\uFF5CAssistant\uFF5C></think>"));
}

TEST(ChatEncode, ReaderNamesTheField) {
  const auto message = [](const std::string& text) { return error_of_messages(R"({"messages":[)" + text + "]}"); };
  const std::string user = R"({"role":"user","content":"a"},)";
  EXPECT_EQ(message(user + user + user + R"({"role":"boss","content":"x"})"),
            "request: field messages[3].role: expected \"system\", \"user\", \"assistant\", \"tool\", \"developer\", "
            "\"latest_reminder\", found \"boss\"");
  const std::pair<std::string, std::string> faults[] = {
      {"7", "request: field messages[0]: expected an object, found 7"},
      {"", "request: field messages: expected at least one message, found an array of 0"},
      {R"({"content":"x"})", "request: field messages[0].role: expected a value, found nothing"},
      {R"({"role":["user"],"content":"x"})", "found an array of 1"},
      {R"({"role":"user"})", "request: field messages[0].content: expected a value, found nothing"},
      {R"({"role":"user","content":null})", "messages[0].content: expected a string or an array of parts, found null"},
      {R"({"role":"tool","content":3})", "messages[0].content: expected a string or an array of parts, found 3"},
      {R"({"role":"user","content":[{"type":"image_url"}]})",
       "messages[0].content[0].type: expected \"text\", found \"image_url\""},
      {R"({"role":"user","content":[{"type":"text"}]})",
       "messages[0].content[0].text: expected a value, found nothing"},
      {R"({"role":"user","content":["x"]})", "messages[0].content[0]: expected an object, found \"x\""},
      {R"({"role":"developer","content":""})", "messages[0].content: expected text, found \"\""},
      {R"({"role":"user","content":"x","task":"cook"})", "messages[0].task: expected \"action\""},
      {R"({"role":"assistant","reasoning_content":1})", "messages[0].reasoning_content: expected a string, found 1"},
      {R"({"role":"assistant","prefix":"yes"})", "messages[0].prefix: expected true or false, found \"yes\""},
      {R"({"role":"assistant","tool_calls":{}})", "messages[0].tool_calls: expected an array, found an object"},
      {R"({"role":"assistant","tool_calls":[{"type":"retrieval"}]})",
       "messages[0].tool_calls[0].type: expected \"function\", found \"retrieval\""},
      {R"({"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]})",
       "messages[0].tool_calls[0].function.arguments: expected a string, found an object"},
      {R"({"role":"assistant","tool_calls":[{"function":{"name":"","arguments":"{}"}}]})",
       "messages[0].tool_calls[0].function.name: expected a name, found \"\""},
      {R"({"role":"tool","content":"x","tool_call_id":4})", "messages[0].tool_call_id: expected a string, found 4"},
      {R"({"role":"system","response_format":"json"})",
       "messages[0].response_format: expected an object, found \"json\""},
      {"{\"role\":\"user\",\"content\":\"a\xff\"}",
       "request: field messages[0].content, byte 39: expected a string in UTF-8"},
      {R"({"role":"user","content":"\ud800"})", "request: field messages[0].content, byte 40: expected a surrogate"},
  };
  for (const auto& [text, expected] : faults) {
    EXPECT_NE(message(text).find(expected), std::string::npos) << text << "\n" << message(text);
  }
}

TEST(ChatEncode, ToolSchemasAreChecked) {
  const auto error = [](const std::string& tools) {
    return error_of_messages(R"({"messages":[{"role":"user","content":"x"}],"tools":)" + tools + "}");
  };
  const auto function = [&](const std::string& inner) {
    return error(R"([{"type":"function","function":)" + inner + "}]");
  };
  const std::pair<std::string, std::string> faults[] = {
      {error("{}"), "field tools: expected an array, found an object"},
      {error("[3]"), "field tools[0]: expected an object, found 3"},
      {error("[{}]"), "field tools[0].function: expected a value, found nothing"},
      {error(R"([{"type":7,"function":{"name":"f"}}])"), "tools[0].type: expected a string, found 7"},
      {function("{}"), "tools[0].function.name: expected a value, found nothing"},
      {function(R"({"name":5})"), "tools[0].function.name: expected a string, found 5"},
      {function(R"({"name":"f","description":[]})"), "function.description: expected a string, found an array"},
      {function(R"({"name":"f","parameters":"none"})"), "function.parameters: expected an object, found \"none\""},
      {function(R"({"name":"f","parameters":{"type":"array"}})"),
       "parameters.type: expected \"object\", found \"array\""},
      {function(R"({"name":"f","parameters":{"type":["null",1]}})"), "parameters.type: expected \"object\""},
      {function(R"({"name":"f","parameters":{"properties":[]}})"), "properties: expected an object, found an array"},
      {function(R"({"name":"f","parameters":{"properties":{"a":1}}})"), "properties.a: expected a schema"},
      {function(R"({"name":"f","parameters":{"required":"a"}})"), "required: expected an array, found \"a\""},
      {function(R"({"name":"f","parameters":{"required":[1]}})"), "required[0]: expected a string, found 1"},
  };
  for (const auto& [found, expected] : faults) EXPECT_NE(found.find(expected), std::string::npos) << found;
  EXPECT_EQ(function(R"({"name":"f","description":null,"parameters":{"type":"object","properties":{"a":true}}})"),
            "no error");
  EXPECT_EQ(function(R"({"name":"f","parameters":{"type":["object","null"]}})"), "no error");
  EXPECT_EQ(error("null"), "no error");
}

TEST(ChatEncode, TypedMessagesAreChecked) {
  std::vector<Message> messages(2);
  messages[0].content = "fine";
  messages[1].content = "a\xff";
  EXPECT_EQ(error_of([&] { render_chat(messages, {}); }), "messages[1].content: expected UTF-8, found \"a\\xff\"");
  messages[1].content = "";
  messages[1].role = Role::kAssistant;
  messages[1].tool_calls = {{"", "f", "\x80"}};
  EXPECT_EQ(error_of([&] { render_chat(messages, {}); }),
            "messages[1].tool_calls[0].function.arguments: expected UTF-8, found \"\\x80\"");
  messages[1].tool_calls.clear();
  EXPECT_NE(error_of([&] { check_answerable(messages); }).find("messages[1].role: expected user"), std::string::npos);
  messages[1].role = Role::kDeveloper;
  EXPECT_EQ(error_of([&] { render_chat(messages, {}); }),
            "messages[1].content: expected text in a developer message, found none");
  EXPECT_EQ(error_of([] { check_answerable({}); }), "messages: expected at least one, found none");
  ChatOptions options;
  options.thinking = Thinking::kOn;
  options.effort = Effort::kLow;
  messages.pop_back();
  EXPECT_EQ(error_of([&] { render_chat(messages, options); }),
            "reasoning effort: expected high or max for a preview release, found low");
  options.effort_table = EffortTable::kOfficial;
  EXPECT_TRUE(render_chat(messages, options).text.ends_with("fine<\uFF5CAssistant\uFF5C><think>"));
}

TEST(ChatEncode, EffortTableOfAModel) {
  const testing::TemporaryFolder folder;
  const std::filesystem::path root(folder.path());
  EXPECT_EQ(effort_table_of_model((root / "DeepSeek-V4-Flash").string()), EffortTable::kPreview);
  EXPECT_EQ(effort_table_of_model((root / "DeepSeek-V4-Flash-0731-NVFP4").string()), EffortTable::kOfficial);
  EXPECT_EQ(effort_table_of_model((root / "DeepSeek-V4-Pro-0813/").string()), EffortTable::kOfficial);
  // The encoder beside the weights says more than the name.
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(root / name / "encoding");
    std::ofstream(root / name / "encoding" / "encoding_dsv4.py") << text;
    return effort_table_of_model((root / name).string());
  };
  EXPECT_EQ(write("mine-0731", "A = 'Reasoning Effort: Absolute maximum'"), EffortTable::kPreview);
  EXPECT_EQ(write("mine", "B = 'Reasoning Effort: Beyond maximum \u2014 exhaustive'"), EffortTable::kOfficial);

  EXPECT_EQ(effort_from_api_name("xhigh", EffortTable::kPreview), Effort::kMax);
  EXPECT_EQ(effort_from_api_name("xhigh", EffortTable::kOfficial), Effort::kHigh);
  EXPECT_EQ(effort_from_api_name("low", EffortTable::kPreview), Effort::kHigh);
  EXPECT_EQ(effort_from_api_name("low", EffortTable::kOfficial), Effort::kLow);
  EXPECT_EQ(effort_from_api_name("some", EffortTable::kOfficial), std::nullopt);
}

TEST(PythonJson, EqualsPython) {
  const std::vector<Json> cases = reference_cases("json");
  EXPECT_GE(cases.size(), 60u);
  for (const Json& item : cases) {
    const std::string& text = item.find("text")->string();
    const Json& dumped = *item.find("dumped");
    if (dumped.kind() == Json::Kind::kNull) {
      EXPECT_THROW(Json::parse_python(text, "f"), Error) << text;
    } else {
      EXPECT_EQ(python_json(Json::parse_python(text, "f")), dumped.string()) << text;
    }
  }
}

}  // namespace
}  // namespace tessera::text
