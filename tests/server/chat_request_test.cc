// SPDX-License-Identifier: Apache-2.0
// Bodies of /v1/chat/completions: what they become, and the 400 that names the field for everything else.
#include "server/openai/chat_request.h"

#include <gtest/gtest.h>

#include "served.h"
#include "text/chat/encode.h"

namespace tessera::server::openai {
namespace {

using nlohmann::ordered_json;

ordered_json minimal() {
  return {{"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", "Hi"}}}}};
}

ChatRequest parsed(const ordered_json& body, const ServedModel& model = served_model()) {
  const Reply<ChatRequest> reply = parse_chat(body.dump(), model);
  EXPECT_TRUE(reply.ok()) << (reply.ok() ? "" : reply.error().message) << "\n" << body.dump();
  return reply.ok() ? reply.value() : ChatRequest{};
}

// Expects a 400 whose param is `field`, and a body below a KiB.
void expect_refused(const std::string& body, const std::string& field, std::string_view code = kInvalidValue,
                    const ServedModel& model = served_model()) {
  const Reply<ChatRequest> reply = parse_chat(body, model);
  ASSERT_FALSE(reply.ok()) << body.substr(0, 400);
  EXPECT_EQ(reply.error().status, 400);
  EXPECT_EQ(reply.error().param, field) << reply.error().message;
  EXPECT_EQ(reply.error().code, code) << reply.error().message;
  EXPECT_EQ(reply.error().message.find('\n'), std::string::npos);
  EXPECT_NE(reply.error().message.find("expected"), std::string::npos) << reply.error().message;
  const std::string rendered = openai_error_body(reply.error());
  EXPECT_LT(rendered.size(), 1024u);
  EXPECT_EQ(ordered_json::parse(rendered).at("error").at("type"), "invalid_request_error");
}

void expect_refused_with(const std::string& pointer, const ordered_json& value, const std::string& field,
                         std::string_view code = kInvalidValue, const ServedModel& model = served_model()) {
  ordered_json body = minimal();
  body[ordered_json::json_pointer(pointer)] = value;
  SCOPED_TRACE(body.dump().substr(0, 300));
  expect_refused(body.dump(), field, code, model);
}

TEST(ChatRequest, DefaultsAreOpenAis) {
  const ChatRequest request = parsed(minimal());
  EXPECT_EQ(request.options.model, "tiny");
  EXPECT_EQ(request.options.sampling.params.temperature, 1);
  EXPECT_EQ(request.options.sampling.params.top_p, 1);
  EXPECT_EQ(request.options.num_choices, 1);
  EXPECT_EQ(request.options.num_logprobs, -1);
  EXPECT_FALSE(request.options.max_tokens);
  EXPECT_FALSE(request.options.seed);
  EXPECT_FALSE(request.options.is_stream);
  EXPECT_EQ(request.chat.thinking, text::Thinking::kOff);
  EXPECT_FALSE(request.tools.may_call());
  ASSERT_EQ(request.messages.size(), 1u);
  EXPECT_EQ(request.messages[0].content, "Hi");
}

TEST(ChatRequest, ReadsEveryField) {
  ordered_json body = minimal();
  body.update(ordered_json::parse(R"({
    "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 40, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.5, "seed": -3, "logit_bias": {"7": -100, "9": 2.5}, "stop": ["a", "b"], "n": 3,
    "stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 20,
    "max_tokens": 10, "max_completion_tokens": 20, "ignore_eos": true, "cache_salt": "s", "priority": -2,
    "reasoning_effort": "max", "thinking_token_budget": 50, "parallel_tool_calls": false, "user": "u", "odd": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": 1e2, "a": 18446744073709551615}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}}})"));
  const ChatRequest request = parsed(body);
  const GenerationOptions& options = request.options;
  EXPECT_EQ(options.sampling.params.temperature, 0.5f);
  EXPECT_EQ(options.sampling.params.top_k, 40);
  EXPECT_EQ(options.sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{7, -100.0f}, {9, 2.5f}}));
  EXPECT_EQ(options.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(options.stops, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(options.num_choices, 3);
  EXPECT_TRUE(options.is_stream && options.streams_usage && options.ignores_end_token);
  EXPECT_EQ(options.num_logprobs, 20);
  EXPECT_EQ(options.max_tokens, 20);
  EXPECT_EQ(options.cache_salt, "s");
  EXPECT_EQ(options.priority, -2);
  EXPECT_EQ(options.ignored, (std::vector<std::string>{"user", "odd"}));
  EXPECT_EQ(request.chat.thinking, text::Thinking::kOn);
  EXPECT_EQ(request.chat.effort, text::Effort::kMax);
  EXPECT_EQ(request.thinking_budget, 50);
  EXPECT_EQ(request.tools.choice, ToolChoice::kNamed);
  EXPECT_EQ(request.tools.named, "f");
  EXPECT_FALSE(request.tools.allows_parallel);
  EXPECT_EQ(request.format.kind, OutputFormat::Kind::kJsonSchema);
  EXPECT_EQ(request.format.definition, R"({"type": "object"})");
  // Tools and format go to a system message that is made for them; every number stays as it was written.
  ASSERT_EQ(request.messages.size(), 2u);
  EXPECT_EQ(request.messages[0].role, text::Role::kSystem);
  ASSERT_EQ(request.messages[0].tools.size(), 1u);
  EXPECT_EQ(request.messages[0].tools[0],
            R"({"name": "f", "parameters": {"type": "object", "b": 100.0, "a": 18446744073709551615}})");
  EXPECT_NE(request.messages[0].response_format.find("json_schema"), std::string::npos);
}

TEST(ChatRequest, TakesNullForWhatMayMiss) {
  ordered_json body = minimal();
  for (const char* field : {"temperature",
                            "top_p",
                            "min_p",
                            "top_k",
                            "seed",
                            "logit_bias",
                            "stop",
                            "n",
                            "stream",
                            "stream_options",
                            "tools",
                            "tool_choice",
                            "response_format",
                            "max_tokens",
                            "max_completion_tokens",
                            "logprobs",
                            "top_logprobs",
                            "best_of",
                            "functions",
                            "function_call",
                            "thinking",
                            "reasoning_effort",
                            "chat_template_kwargs",
                            "modalities"}) {
    body[field] = nullptr;
  }
  body["tools"] = ordered_json::array();
  EXPECT_FALSE(parsed(body).tools.may_call());
}

// Goal: each numeric field at every bad value gives a 400 that names it.
TEST(ChatRequest, NumbersOutOfRangeAreNamed) {
  const struct {
    const char* name;
    double least, most;
    bool is_integer;
  } fields[] = {{"temperature", 0, 2, false},
                {"top_p", 0, 1, false},
                {"min_p", 0, 1, false},
                {"presence_penalty", -2, 2, false},
                {"frequency_penalty", -2, 2, false},
                {"repetition_penalty", 0.01, 100, false},
                {"top_k", -1, 1 << 30, true},
                {"n", 1, 16, true},
                {"max_tokens", 1, kMaxTokens, true},
                {"max_completion_tokens", 1, kMaxTokens, true},
                {"priority", -100, 100, true},
                {"thinking_token_budget", 0, kMaxTokens, true}};
  for (const auto& field : fields) {
    const std::string pointer = std::string("/") + field.name;
    for (const double bad : {field.least - 1, field.most + 1, -0x1p63, 0x1p63, 1e300}) {
      expect_refused_with(pointer, bad, field.name);
    }
    for (const ordered_json& bad :
         {ordered_json("1"), ordered_json(true), ordered_json::array(), ordered_json::object()}) {
      expect_refused_with(pointer, bad, field.name);
    }
    if (field.is_integer) expect_refused_with(pointer, field.least + 1.5, field.name);
    for (const double good : {field.least, field.most}) {
      ordered_json body = minimal();
      body[field.name] = good;
      if (field.is_integer) body[field.name] = static_cast<int64_t>(good);
      parsed(body);
    }
  }
  expect_refused_with("/top_logprobs", 21, "top_logprobs");
  expect_refused_with("/top_logprobs", 2, "top_logprobs", kConflict);
  expect_refused(R"({"model":"tiny","messages":[{"role":"user","content":"a"}],"seed":9223372036854775808})", "seed");
  expect_refused(R"({"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1e400})", "",
                 kMalformedJson);
}

TEST(ChatRequest, BadFieldsAreNamed) {
  const ordered_json long_stop = std::string(257, 'x');
  expect_refused_with("/model", 3, "model");
  expect_refused_with("/model", "", "model");
  expect_refused_with("/messages", ordered_json::array(), "messages");
  expect_refused_with("/messages", "Hi", "messages");
  expect_refused_with("/messages/0", nullptr, "messages[0]");
  expect_refused_with("/messages/0/role", "latest_reminder", "messages[0].role");
  expect_refused_with("/messages/0/role", 4, "messages[0].role");
  expect_refused_with("/messages/0/content", nullptr, "messages[0].content");
  expect_refused_with("/messages/0/content", {{{"type", "image_url"}, {"image_url", {{"url", "x"}}}}},
                      "messages[0].content[0].type");
  expect_refused_with("/messages/0/content", {{{"type", "text"}}}, "messages[0].content[0].text", kMissingField);
  expect_refused_with("/messages/0/task", "title", "messages[0].task", kUnsupported);
  expect_refused_with("/messages/1", {{"role", "assistant"}, {"content", "x"}}, "messages");
  expect_refused_with("/messages/0", {{"role", "system"}, {"content", "x"}}, "messages");
  expect_refused_with("/messages/1", {{"role", "tool"}, {"content", "x"}}, "messages[1].tool_call_id", kMissingField);
  expect_refused_with("/messages/1",
                      {{"role", "assistant"}, {"tool_calls", {{{"id", "a"}, {"function", {{"name", "f"}}}}}}},
                      "messages[1].tool_calls[0].function.arguments", kMissingField);
  expect_refused_with("/stop", long_stop, "stop");
  std::string many_bytes;
  for (int i = 0; i < 86; ++i) many_bytes += "世";  // 258 bytes, 86 characters
  expect_refused_with("/stop", many_bytes, "stop");
  expect_refused_with("/stop", {"a", many_bytes}, "stop[1]");
  expect_refused_with("/stop", std::vector<std::string>(17, "a"), "stop");
  expect_refused_with("/stop", {"a", ""}, "stop[1]");
  expect_refused_with("/stop", {"a", 1}, "stop[1]");
  expect_refused_with("/logit_bias", {{"1000", 1}}, "logit_bias.1000");
  expect_refused_with("/logit_bias", {{"x", 1}}, "logit_bias.x");
  expect_refused_with("/logit_bias", {{"5", 101}}, "logit_bias.5");
  ordered_json biases = ordered_json::object();
  for (int i = 0; i < 1025; ++i) biases[std::to_string(i)] = 1;
  expect_refused_with("/logit_bias", biases, "logit_bias");
  expect_refused_with("/stream", "yes", "stream");
  expect_refused_with("/stream_options", true, "stream_options");
  expect_refused_with("/stream_options", {{"include_usage", 1}}, "stream_options.include_usage");
  expect_refused_with("/reasoning_effort", "huge", "reasoning_effort");
  expect_refused_with("/thinking", {{"type", "maybe"}}, "thinking.type");
  expect_refused_with("/thinking", {{"type", "enabled"}, {"budget_tokens", -1}}, "thinking.budget_tokens");
  expect_refused_with("/response_format", {{"type", "xml"}}, "response_format.type");
  expect_refused_with("/response_format", {{"type", "json_schema"}}, "response_format.json_schema", kMissingField);
  expect_refused_with("/response_format",
                      {{"type", "json_schema"},
                       {"json_schema", {{"name", "a"}, {"schema", {{"x", std::string(kMaxSchemaBytes, 'x')}}}}}},
                      "response_format.json_schema.schema");
  expect_refused_with("/response_format", {{"type", "regex"}, {"pattern", ""}}, "response_format.pattern");
}

TEST(ChatRequest, BadToolsAreNamed) {
  const auto tool = [](const ordered_json& function) {
    return ordered_json::array({{{"type", "function"}, {"function", function}}});
  };
  expect_refused_with("/tools", {{{"type", "web_search"}}}, "tools[0].type");
  expect_refused_with("/tools", tool({{"description", "x"}}), "tools[0].function.name", kMissingField);
  expect_refused_with("/tools", tool({{"name", "a\"b"}}), "tools[0].function.name");
  expect_refused_with("/tools", tool({{"name", ""}}), "tools[0].function.name");
  expect_refused_with("/tools", tool({{"name", "f"}, {"parameters", "x"}}), "tools[0].function.parameters");
  expect_refused_with("/tools", tool({{"name", "f"}, {"parameters", {{"type", "string"}}}}),
                      "tools[0].function.parameters.type");
  expect_refused_with("/tools", tool({{"name", "f"}, {"parameters", {{"properties", {{"a", 1}}}}}}),
                      "tools[0].function.parameters.properties.a");
  ordered_json many = ordered_json::array();
  for (int i = 0; i < 257; ++i)
    many.push_back({{"type", "function"}, {"function", {{"name", "f" + std::to_string(i)}}}});
  expect_refused_with("/tools", many, "tools");
  expect_refused_with("/tool_choice", "always", "tool_choice");
  expect_refused_with("/tool_choice", "required", "tool_choice", kConflict);
  expect_refused_with("/tool_choice", {{"type", "function"}, {"function", {{"name", "g"}}}}, "tool_choice", kConflict);
  expect_refused_with("/tool_choice", {{"type", "allowed_tools"}}, "tool_choice.type");
}

TEST(ChatRequest, RefusesWhatItWouldNotHonour) {
  expect_refused_with("/best_of", 2, "best_of", kUnsupported);
  expect_refused_with("/echo", true, "echo", kUnsupported);
  expect_refused_with("/use_beam_search", true, "use_beam_search", kUnsupported);
  expect_refused_with("/skip_special_tokens", false, "skip_special_tokens", kUnsupported);
  expect_refused_with("/verbosity", "high", "verbosity", kUnsupported);
  expect_refused_with("/modalities", {"text", "audio"}, "modalities");
  for (const char* field : {"functions", "function_call", "audio", "prediction", "web_search_options", "guided_json",
                            "structured_outputs", "stop_token_ids", "bad_words", "chat_template", "grammar"}) {
    expect_refused_with(std::string("/") + field, {{"a", 1}}, field, kUnsupported);
    expect_refused_with(std::string("/") + field, "x", field, kUnsupported);
  }
  // Without grammars.
  const ServedModel plain = served_model(false);
  expect_refused_with("/response_format", {{"type", "json_object"}}, "response_format.type", kUnsupported, plain);
  ordered_json body = minimal();
  body["tools"] = {{{"type", "function"}, {"function", {{"name", "f"}}}}};
  body["tool_choice"] = "required";
  expect_refused(body.dump(), "tool_choice", kUnsupported, plain);
  body["tool_choice"] = "none";
  EXPECT_FALSE(parsed(body, plain).tools.may_call());
}

TEST(ChatRequest, MalformedBodies) {
  for (const std::string& body : std::vector<std::string>{
           "", "{", "null", "[]", "3", "\"a\"", "{\"model\":\"tiny\"}}", "{\"model\":NaN}", "{\"a\":1,\"a\":2}",
           "{\"model\":\"\xff\"}", "{\"model\":\"\\ud800\"}", std::string("{\"a\":\"\0\"}", 9), "{'a':1}",
           "\xEF\xBB\xBF{}", "{\"a\":" + std::string(10000, '[') + "}", std::string(10000, '{')}) {
    const Reply<ChatRequest> reply = parse_chat(body, served_model());
    ASSERT_FALSE(reply.ok()) << body.substr(0, 40);
    EXPECT_EQ(reply.error().status, 400);
    EXPECT_LT(openai_error_body(reply.error()).size(), 1024u);
  }
  const Reply<ChatRequest> reply =
      parse_chat(R"({"model":"gpt-6","messages":[{"role":"user","content":"a"}]})", served_model());
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().status, 404);
  EXPECT_EQ(reply.error().param, "model");
  // Names that a client chose do not make answers long or dirty.
  ordered_json body = minimal();
  body["logit_bias"] = {{std::string(5000, '"') + "\n", 1}};
  const Reply<ChatRequest> odd = parse_chat(body.dump(), served_model());
  ASSERT_FALSE(odd.ok());
  EXPECT_LT(openai_error_body(odd.error()).size(), 1024u);
}

TEST(ChatRequest, Thinking) {
  const auto thinking = [](const char* fields, bool by_default) {
    ServedModel model = served_model();
    model.thinks_by_default = by_default;
    ordered_json body = minimal();
    body.update(ordered_json::parse(fields));
    return parsed(body, model).chat.thinking == text::Thinking::kOn;
  };
  EXPECT_TRUE(thinking("{}", true));
  EXPECT_FALSE(thinking("{}", false));
  EXPECT_TRUE(thinking(R"({"reasoning_effort":"low"})", false));
  EXPECT_FALSE(thinking(R"({"reasoning_effort":"none"})", true));
  EXPECT_TRUE(thinking(R"({"chat_template_kwargs":{"thinking":true}})", false));
  EXPECT_FALSE(thinking(R"({"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"high"})", true));
  EXPECT_FALSE(thinking(R"({"thinking":{"type":"disabled"},"reasoning_effort":"high"})", true));
  EXPECT_TRUE(thinking(R"({"thinking":{"type":"enabled"},"chat_template_kwargs":{"thinking":false}})", false));
}

TEST(ChatRequest, ArrangesSystemMessages) {
  const ChatRequest request = parsed(ordered_json::parse(R"({"model":"tiny","messages":[
    {"role":"system","content":"A"},{"role":"developer","content":[{"type":"text","text":"B"},{"type":"text","text":"C"}]},
    {"role":"user","content":"Q"},{"role":"assistant","content":null,"reasoning":"R","tool_calls":[
      {"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}]},
    {"role":"tool","tool_call_id":"c1","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{}}]},
    {"role":"system","content":"D"}],"tools":[{"type":"function","function":{"name":"f"}}]})"));
  ASSERT_EQ(request.messages.size(), 5u);
  EXPECT_EQ(request.messages[0].content, "A\n\nB\n\nC");
  EXPECT_EQ(request.messages[0].tools.size(), 1u);
  EXPECT_EQ(request.messages[2].reasoning, "R");
  EXPECT_EQ(request.messages[3].content, "x\n\n[Unsupported image_url]");
  EXPECT_EQ(request.messages[4].role, text::Role::kUser);
  // Rendering takes whatever parsing takes.
  EXPECT_NE(text::render_chat(request.messages, request.chat).text.find("</tool_result>\n\nD"), std::string::npos);
}

}  // namespace
}  // namespace tessera::server::openai
