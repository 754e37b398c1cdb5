// SPDX-License-Identifier: Apache-2.0
// Answers that are held to a schema, a regular expression or a tool's parameters, through the whole server. The
// scripted model says what it likes; where that is not allowed, the first token that is.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "server/http/live_server.h"

namespace tessera::server::http {
namespace {

constexpr char kClose[] = "Connection: close\r\n";
constexpr char kBounded[] =
    R"({"type":"object","properties":{"city":{"type":"string","maxLength":6},"n":{"type":"integer","minimum":1,"maximum":40},"k":{"enum":["x","y"]}},"required":["city","n","k"],"additionalProperties":false})";

Answer ask_at(const LiveServer& server, std::string_view path, const std::string& body) {
  return ask(server.port(), post(path, body, kClose));
}

// A field of the answer, such as {"choices", "0", "message"}; null where there is none.
const Json& at(const Json& root, std::initializer_list<std::string_view> path) {
  static const Json kNull;
  const Json* found = &root;
  for (const std::string_view key : path) {
    const bool is_index = key[0] >= '0' && key[0] <= '9';
    if (is_index) {
      const size_t i = static_cast<size_t>(key[0] - '0');
      found = i < found->array().size() ? &found->array()[i] : nullptr;
    } else {
      found = found->find(key);
    }
    if (found == nullptr) return kNull;
  }
  return *found;
}

void expect_bounded(const std::string& text) {
  const Json json = Json::parse(text, "answer");
  EXPECT_EQ(json.object().size(), 3u) << text;
  EXPECT_EQ(at(json, {"city"}).kind(), Json::Kind::kString) << text;
  EXPECT_GE(at(json, {"n"}).integer(), 1) << text;
  EXPECT_LE(at(json, {"n"}).integer(), 40) << text;
  EXPECT_TRUE(at(json, {"k"}).string() == "x" || at(json, {"k"}).string() == "y") << text;
}

std::string format_of(std::string_view schema) {
  return R"("response_format":{"type":"json_schema","json_schema":{"name":"a","schema":)" + std::string(schema) + "}},";
}

std::string tools(std::string_view choice, std::string_view more = "") {
  return R"("tools":[{"type":"function","function":{"name":"find","parameters":)" + std::string(kBounded) +
         R"(}},{"type":"function","function":{"name":"stop","parameters":{"type":"object","properties":{}}}}],)"
         R"("parallel_tool_calls":false,"tool_choice":)" +
         std::string(choice) + "," + std::string(more);
}

TEST(HttpGrammar, EveryApiHoldsAnAnswerToItsSchema) {
  LiveServer server;
  const Json chat_answer = Json::parse(ask_at(server, "/v1/chat/completions", chat(format_of(kBounded))).body, "chat");
  expect_bounded(at(chat_answer, {"choices", "0", "message", "content"}).string());
  EXPECT_EQ(at(chat_answer, {"choices", "0", "finish_reason"}).string(), "stop");
  const std::string schema(kBounded);
  const Json response =
      Json::parse(ask_at(server, "/v1/responses",
                         R"({"model":"tiny","input":"Hi","text":{"format":{"type":"json_schema","name":"a","schema":)" +
                             schema + "}}}")
                      .body,
                  "responses");
  expect_bounded(at(response, {"output", "0", "content", "0", "text"}).string());
  const Json message =
      Json::parse(ask_at(server, "/v1/messages",
                         R"({"model":"tiny","max_tokens":200,"messages":[{"role":"user","content":"Hi"}],)"
                         R"("output_config":{"format":{"type":"json_schema","schema":)" +
                             schema + "}}}")
                      .body,
                  "messages");
  expect_bounded(at(message, {"content", "0", "text"}).string());
}

TEST(HttpGrammar, WhatFitsIsLeftAsTheModelSaysIt) {
  LiveServer::Setup setup;
  setup.answer = R"({"city": "Rome", "n": 12, "k": "y"})";
  LiveServer server(setup);
  const Json answer =
      Json::parse(ask_at(server, "/v1/chat/completions", chat(format_of(kBounded) + R"("n":2,)")).body, "chat");
  EXPECT_EQ(at(answer, {"choices", "0", "message", "content"}).string(), setup.answer);
  EXPECT_EQ(at(answer, {"choices", "1", "message", "content"}).string(), setup.answer);
  const Answer stream = ask_at(server, "/v1/chat/completions", chat(format_of(kBounded) + R"("stream":true,)"));
  EXPECT_NE(stream.body.find("\"finish_reason\":\"stop\""), std::string::npos) << stream.body;
}

TEST(HttpGrammar, ARegularExpressionAndJsonModeHold) {
  LiveServer server;
  const Json regex = Json::parse(
      ask_at(server, "/v1/chat/completions", chat(R"("response_format":{"type":"regex","pattern":"(yes|no)!"},)")).body,
      "chat");
  const std::string& said = at(regex, {"choices", "0", "message", "content"}).string();
  EXPECT_TRUE(said == "yes!" || said == "no!") << said;
  LiveServer::Setup setup;
  setup.answer = R"({"any": [1, {"thing": null}]})";
  LiveServer object(setup);
  const Json any = Json::parse(
      ask_at(object, "/v1/chat/completions", chat(R"("response_format":{"type":"json_object"},)")).body, "chat");
  EXPECT_EQ(at(any, {"choices", "0", "message", "content"}).string(), setup.answer);
}

TEST(HttpGrammar, RequiredAndNamedToolsAreCalledAsTheirSchemasSay) {
  LiveServer server;
  for (const char* choice : {R"("required")", R"({"type":"function","function":{"name":"find"}})"}) {
    for (const char* thinking : {"", R"("thinking":{"type":"enabled"},)"}) {
      LiveServer::Setup setup;
      if (*thinking != 0) setup.answer = "so I think</think>what I like";
      LiveServer one(setup);
      const Json answer = Json::parse(
          ask_at(one, "/v1/chat/completions", chat(tools(choice, thinking) + R"("max_tokens":300,)")).body, "chat");
      EXPECT_EQ(at(answer, {"choices", "0", "finish_reason"}).string(), "tool_calls") << choice << thinking;
      const Json& call = at(answer, {"choices", "0", "message", "tool_calls", "0", "function"});
      if (*choice == '{') {
        EXPECT_EQ(at(call, {"name"}).string(), "find");
      }
      if (at(call, {"name"}).string() == "find") expect_bounded(at(call, {"arguments"}).string());
      if (*thinking != 0) {
        EXPECT_EQ(at(answer, {"choices", "0", "message", "reasoning_content"}).string(), "so I think");
      }
    }
  }
  const Answer stream = ask_at(server, "/v1/chat/completions",
                               chat(tools(R"({"type":"function","function":{"name":"find"}})") + R"("stream":true,)"));
  EXPECT_NE(stream.body.find("\"name\":\"find\""), std::string::npos);
  EXPECT_NE(stream.body.find("\"finish_reason\":\"tool_calls\""), std::string::npos);
}

// Whatever of a call's markup max_tokens leaves, none of it is content.
TEST(HttpGrammar, ARequiredCallThatIsCutOffHasNoContent) {
  LiveServer server;
  for (int max_tokens = 1; max_tokens <= 40; ++max_tokens) {
    const Answer answer = ask_at(server, "/v1/chat/completions",
                                 chat(tools(R"("required")") + fmt::format("\"max_tokens\":{},", max_tokens)));
    ASSERT_EQ(answer.status, 200) << answer.body;
    const Json body = Json::parse(answer.body, "chat");
    const Json& content = at(body, {"choices", "0", "message", "content"});
    EXPECT_TRUE(content.kind() != Json::Kind::kString || content.string().empty()) << answer.body;
  }
}

TEST(HttpGrammar, WhatCannotBeHeldIsRefusedNamingItsField) {
  LiveServer server;
  const auto refused = [&](const std::string& fields, std::string_view param, std::string_view words) {
    const Answer answer = ask_at(server, "/v1/chat/completions", chat(fields));
    EXPECT_EQ(answer.status, 400) << answer.body;
    const Json body = Json::parse(answer.body, "error");
    EXPECT_EQ(at(body, {"error", "param"}).string(), param);
    EXPECT_NE(at(body, {"error", "message"}).string().find(words), std::string::npos) << answer.body;
  };
  refused(format_of(R"({"not":{"type":"string"}})"), "response_format.json_schema.schema", "schema.not");
  refused(format_of(R"({"type":"string","maxLength":100000})"), "response_format.json_schema.schema", "at most 4096");
  refused(format_of(R"({"$ref":"#/$defs/missing"})"), "response_format.json_schema.schema", "");
  refused(R"("response_format":{"type":"regex","pattern":"((a{99}){99}){99}"},)", "response_format.pattern", "at most");
  refused(R"("response_format":{"type":"regex","pattern":"(a"},)", "response_format.pattern", "");
  refused(R"("tools":[{"function":{"name":"f","strict":true,"parameters":{"type":"object","properties":)"
          R"({"a":{"uniqueItems":true}}}}}],"tool_choice":"required",)",
          "tools[0].function.parameters", "schema.properties.a.uniqueItems");
  EXPECT_TRUE(server.becomes_idle());
}

// What is built to take a grammar's compiler long is refused by its limits, or compiled, and nobody else notices.
TEST(HttpGrammar, HostileDefinitionsEndAtTheirLimits) {
  LiveServer server;
  const auto many = [](int count, const std::string& begin, const std::string& one, const std::string& end) {
    std::string out = begin;
    for (int i = 0; i < count; ++i) out += (i > 0 ? "," : "") + fmt::format(fmt::runtime(one), i);
    return out + end;
  };
  const std::string slow = many(3000, R"({"type":"object","properties":{)", R"("p{}":{{"type":"string"}})", "}}");
  const std::string too_many = many(10001, R"({"type":"object","properties":{)", R"("p{}":{{}})", "}}");
  std::string deep = R"({"type":"string"})";
  for (int i = 0; i < 100; ++i) deep = R"({"type":"array","items":)" + deep + "}";
  const char* cycle = R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})";
  const auto ask_with = [&](const std::string& fields) {
    return ask_at(server, "/v1/chat/completions", chat(fields + R"("max_tokens":4,)"));
  };
  for (const std::string& schema : {slow, too_many, deep, std::string(cycle), std::string(R"({"type":"no such"})")}) {
    const Answer answer = ask_with(format_of(schema));
    SCOPED_TRACE(schema.substr(0, 80) + " -> " + answer.body.substr(0, 300));
    // 503 where the machine is so busy that the clock ends it.
    const bool is_busy = answer.status == 503 && answer.body.find("ask again") != std::string::npos;
    if (!is_busy) {
      EXPECT_EQ(answer.status, 400);
      if (schema != deep) {  // its depth may be the body's fault
        EXPECT_NE(answer.body.find(R"("param":"response_format)"), std::string::npos);
      }
    }
    EXPECT_EQ(ask_at(server, "/v1/chat/completions", chat()).status, 200);
  }
  for (const char* pattern : {"(a+)+$", "(a|a)*b", "(.*a){40}", "(a?){500}a{500}"}) {
    const Answer answer =
        ask_with(R"("response_format":{"type":"regex","pattern":")" + std::string(pattern) + R"("},)");
    EXPECT_TRUE(answer.status == 200 || answer.status == 400 || answer.status == 503) << pattern << answer.body;
  }
  EXPECT_TRUE(server.becomes_idle());
}

// New grammars wait in a lane of their own: where it is full their requests are refused, and nobody else's.
TEST(HttpGrammar, AFullLaneRefusesNewGrammarsAlone) {
  LiveServer::Setup setup;
  setup.max_compiling = 0;
  LiveServer server(setup);
  const Answer refused = ask_at(server, "/v1/chat/completions", chat(format_of(kBounded)));
  EXPECT_EQ(refused.status, 429) << refused.body;
  EXPECT_NE(refused.head.find("Retry-After: 2"), std::string::npos) << refused.head;
  EXPECT_NE(refused.body.find("being compiled"), std::string::npos) << refused.body;
  EXPECT_EQ(ask_at(server, "/v1/chat/completions", chat()).status, 200);
  // What no grammar can hold is known without the lane.
  EXPECT_EQ(ask_at(server, "/v1/chat/completions", chat(format_of(R"({"not":{}})"))).status, 400);
  EXPECT_TRUE(server.becomes_idle());
}

}  // namespace
}  // namespace tessera::server::http
