// SPDX-License-Identifier: Apache-2.0
// Bodies of /v1/completions, /v1/responses, /v1/messages, count_tokens, /tokenize and /detokenize.
#include <gtest/gtest.h>

#include "served.h"
#include "server/anthropic/messages_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"

namespace tessera::server {
namespace {

using nlohmann::ordered_json;

template <class Parse>
void expect_refused(const Parse& parse, const ordered_json& body, const std::string& field,
                    std::string_view code = kInvalidValue) {
  SCOPED_TRACE(body.dump().substr(0, 300));
  const auto reply = parse(body.dump(), served_model());
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().status, 400);
  EXPECT_EQ(reply.error().param, field) << reply.error().message;
  EXPECT_EQ(reply.error().code, code) << reply.error().message;
}

template <class Parse>
auto parsed(const Parse& parse, const std::string& body, const ServedModel& model = served_model()) {
  auto reply = parse(body, model);
  EXPECT_TRUE(reply.ok()) << (reply.ok() ? "" : reply.error().message) << body;
  return reply.ok() ? reply.value() : std::decay_t<decltype(reply.value())>{};
}

ordered_json with(const char* base, const char* key, const ordered_json& value) {
  ordered_json body = ordered_json::parse(base);
  body[key] = value;
  return body;
}

TEST(CompletionRequest, PromptsOfEveryForm) {
  const auto prompts = [](const char* prompt) {
    return parsed(openai::parse_completion, std::string(R"({"model":"tiny","prompt":)") + prompt + "}").prompts;
  };
  EXPECT_EQ(prompts("\"a\""), (std::vector<Prompt>{std::string("a")}));
  EXPECT_EQ(prompts(R"(["a","b"])"), (std::vector<Prompt>{std::string("a"), std::string("b")}));
  EXPECT_EQ(prompts("[1,2.0]"), (std::vector<Prompt>{std::vector<int32_t>{1, 2}}));
  EXPECT_EQ(prompts("[[1],[2,3]]"), (std::vector<Prompt>{std::vector<int32_t>{1}, std::vector<int32_t>{2, 3}}));
  // As lm-eval asks.
  const CompletionRequest request = parsed(
      openai::parse_completion,
      R"({"model":"tiny","prompt":[[5,6]],"temperature":0,"max_tokens":1,"logprobs":1,"seed":1234,"echo":true})");
  EXPECT_TRUE(request.echoes);
  EXPECT_EQ(request.options.num_logprobs, 1);
  EXPECT_EQ(request.options.max_tokens, 1);
  EXPECT_FALSE(parsed(openai::parse_completion, R"({"model":"tiny","prompt":"a","suffix":null})").options.max_tokens);
}

TEST(CompletionRequest, BadFieldsAreNamed) {
  const char* base = R"({"model":"tiny","prompt":"a"})";
  const auto refuse = [&](const char* key, const ordered_json& value, const char* field,
                          std::string_view code = kInvalidValue) {
    expect_refused(openai::parse_completion, with(base, key, value), field, code);
  };
  refuse("prompt", nullptr, "prompt");
  refuse("prompt", "", "prompt");
  refuse("prompt", ordered_json::array(), "prompt");
  refuse("prompt", {1, "a"}, "prompt[1]");
  refuse("prompt", {"a", 1}, "prompt[1]");
  refuse("prompt", {{1}, {1, 1000}}, "prompt[1][1]");
  refuse("prompt", {1, -1}, "prompt[1]");
  refuse("prompt", ordered_json::array({ordered_json::array()}), "prompt[0]");
  refuse("prompt", {true}, "prompt");
  refuse("suffix", "x", "suffix", kUnsupported);
  refuse("logprobs", 21, "logprobs");
  refuse("logprobs", true, "logprobs");
  refuse("echo", 1, "echo");
  refuse("max_tokens", -1, "max_tokens");
  refuse("best_of", 3, "best_of", kUnsupported);
  expect_refused(openai::parse_completion, {{"model", "tiny"}, {"prompt", std::vector<std::string>(65, "a")}, {"n", 2}},
                 "n", kConflict);
  expect_refused(openai::parse_completion, {{"model", "tiny"}}, "prompt", kMissingField);
}

TEST(ResponsesRequest, ItemsBecomeMessages) {
  const openai::ResponsesRequest request = parsed(openai::parse_responses, R"({"model":"tiny","instructions":"S",
    "reasoning":{"effort":"high","summary":"auto"},"max_output_tokens":9,"store":false,"metadata":{"a":"b"},
    "include":["reasoning.encrypted_content","message.output_text.logprobs"],"top_logprobs":2,
    "tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":true}],
    "input":[{"role":"user","content":"Q"},
      {"type":"reasoning","id":"rs","summary":[],"content":[{"type":"reasoning_text","text":"R"}]},
      {"type":"message","role":"assistant","content":[{"type":"output_text","text":"A"}]},
      {"type":"function_call","call_id":"c1","name":"f","arguments":"{}"},
      {"type":"function_call","call_id":"c2","name":"f","arguments":"{}"},
      {"type":"function_call_output","call_id":"c1","output":"O"},
      {"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"P"}]},
      {"type":"message","role":"developer","content":[{"type":"input_text","text":"D"}]}]})");
  const std::vector<text::Message>& messages = request.chat.messages;
  ASSERT_EQ(messages.size(), 6u);
  EXPECT_EQ(messages[0].content, "S");
  EXPECT_EQ(messages[0].tools[0], R"({"name": "f", "description": "d", "parameters": {"type": "object"}})");
  EXPECT_EQ(messages[2].reasoning, "R");
  EXPECT_EQ(messages[2].content, "A");
  ASSERT_EQ(messages[2].tool_calls.size(), 2u);
  EXPECT_EQ(messages[2].tool_calls[1].id, "c2");
  EXPECT_EQ(messages[4].content, "P");
  EXPECT_EQ(messages[5].role, text::Role::kUser);
  EXPECT_EQ(request.chat.chat.thinking, text::Thinking::kOn);
  EXPECT_EQ(request.chat.options.max_tokens, 9);
  EXPECT_EQ(request.chat.options.num_logprobs, 2);
  EXPECT_TRUE(request.chat.tools.tools[0].is_strict);
  const ordered_json repeated = ordered_json::parse(request.repeated);
  EXPECT_EQ(repeated["instructions"], "S");
  EXPECT_EQ(repeated["tools"][0]["name"], "f");
  EXPECT_EQ(repeated["tool_choice"], "auto");
  EXPECT_EQ(repeated["metadata"]["a"], "b");
}

TEST(ResponsesRequest, BadFieldsAreNamed) {
  const char* base = R"({"model":"tiny","input":"a"})";
  const auto refuse = [&](const char* key, const ordered_json& value, const char* field,
                          std::string_view code = kInvalidValue) {
    expect_refused(openai::parse_responses, with(base, key, value), field, code);
  };
  refuse("input", 3, "input");
  refuse("input", ordered_json::array(), "input");
  refuse("input", {{{"type", "item_reference"}, {"id", "x"}}}, "input[0].type");
  refuse("input", {{{"role", "user"}, {"content", {{{"type", "input_image"}}}}}}, "input[0].content[0].type");
  refuse("input", {{{"role", "system"}, {"content", "a"}}}, "input");
  refuse("input", {{{"type", "function_call"}, {"name", "f"}, {"arguments", ""}}}, "input[0].call_id", kMissingField);
  refuse("store", true, "store", kUnsupported);
  refuse("background", true, "background", kUnsupported);
  refuse("previous_response_id", "resp_1", "previous_response_id", kUnsupported);
  refuse("conversation", {{"id", "x"}}, "conversation", kUnsupported);
  refuse("prompt", {{"id", "x"}}, "prompt", kUnsupported);
  refuse("truncation", "auto", "truncation", kUnsupported);
  refuse("n", 2, "n", kUnsupported);
  refuse("tools", {{{"type", "web_search"}}}, "tools[0].type");
  refuse("tool_choice", {{"type", "function"}, {"name", "f"}}, "tool_choice", kConflict);
  refuse("text", {{"format", {{"type", "regex"}}}}, "text.format.type");
  refuse("reasoning", {{"effort", "x"}}, "reasoning.effort");
  refuse("max_output_tokens", 0, "max_output_tokens");
  refuse("metadata", {{"a", 1}}, "metadata.a");
}

TEST(MessagesRequest, BlocksBecomeMessages) {
  const ChatRequest request = parsed(anthropic::parse_messages, R"({"model":"tiny","max_tokens":2048,
    "system":[{"type":"text","text":"S","cache_control":{"type":"ephemeral"}},{"type":"text","text":"T"}],
    "thinking":{"type":"enabled","budget_tokens":2048},"output_config":{"effort":"max"},"stop_sequences":["x"],
    "temperature":0.5,"top_k":5,"stream":true,"metadata":{"user_id":"u"},"n":"nonsense","stop":7,
    "tools":[{"name":"f","description":"d","input_schema":{"type":"object"}},{"type":"custom","name":"g","input_schema":{}}],
    "tool_choice":{"type":"auto","disable_parallel_tool_use":true},
    "messages":[{"role":"user","content":"Q"},
      {"role":"assistant","content":[{"type":"thinking","thinking":"R","signature":"s"},{"type":"text","text":"A"},
        {"type":"tool_use","id":"t1","name":"f","input":{"b":1,"a":"x"}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","is_error":true,
        "content":[{"type":"text","text":"bad"},{"type":"image","source":{}}]},{"type":"text","text":"Go on"}]}]})");
  ASSERT_EQ(request.messages.size(), 5u);
  EXPECT_EQ(request.messages[0].content, "S\n\nT");
  EXPECT_EQ(request.messages[0].tools[0], R"({"name": "f", "description": "d", "parameters": {"type": "object"}})");
  EXPECT_EQ(request.messages[2].reasoning, "R");
  EXPECT_EQ(request.messages[2].tool_calls[0].arguments, R"({"b": 1, "a": "x"})");
  EXPECT_EQ(request.messages[3].content, "[error] bad\n\n[Unsupported image]");
  EXPECT_EQ(request.messages[3].tool_call_id, "t1");
  EXPECT_EQ(request.messages[4].content, "Go on");
  EXPECT_EQ(request.chat.thinking, text::Thinking::kOn);
  EXPECT_EQ(request.chat.effort, text::Effort::kMax);
  EXPECT_EQ(request.thinking_budget, 2048);
  EXPECT_EQ(request.options.stops, std::vector<std::string>{"x"});
  EXPECT_EQ(request.options.num_choices, 1);  // fields of the other API mean nothing here
  EXPECT_FALSE(request.tools.allows_parallel);
  EXPECT_TRUE(request.options.is_stream);
  // A text to go on with.
  const ChatRequest open = parsed(anthropic::parse_messages, R"({"model":"tiny","max_tokens":1,"messages":[
    {"role":"user","content":"Q"},{"role":"assistant","content":"A"},{"role":"assistant","content":"B"}]})");
  ASSERT_EQ(open.messages.size(), 2u);
  EXPECT_EQ(open.messages[1].content, "AB");
  EXPECT_TRUE(open.messages[1].is_open);
  EXPECT_EQ(open.chat.thinking, text::Thinking::kOff);
  EXPECT_EQ(parsed(anthropic::parse_count_tokens, R"({"model":"tiny","messages":[{"role":"user","content":"Q"}]})")
                .messages.size(),
            1u);
}

TEST(MessagesRequest, BadFieldsAreNamed) {
  const char* base = R"({"model":"tiny","max_tokens":5,"messages":[{"role":"user","content":"Q"}]})";
  const auto refuse = [&](const char* key, const ordered_json& value, const char* field,
                          std::string_view code = kInvalidValue) {
    expect_refused(anthropic::parse_messages, with(base, key, value), field, code);
  };
  refuse("max_tokens", nullptr, "max_tokens");
  refuse("max_tokens", -1, "max_tokens");
  refuse("messages", {{{"role", "system"}, {"content", "a"}}}, "messages[0].role");
  refuse("messages", {{{"role", "user"}, {"content", {{{"type", "image"}}}}}}, "messages[0].content[0].type");
  refuse("messages", {{{"role", "user"}, {"content", {{{"type", "tool_use"}}}}}}, "messages[0].content[0].type");
  refuse("messages", {{{"role", "user"}, {"content", {{{"type", "tool_result"}}}}}},
         "messages[0].content[0].tool_use_id", kMissingField);
  refuse("messages",
         {{{"role", "user"}, {"content", "a"}},
          {{"role", "assistant"}, {"content", {{{"type", "tool_use"}, {"id", "a"}, {"name", "f"}, {"input", "x"}}}}}},
         "messages[1].content[0].input");
  refuse("messages",
         {{{"role", "user"}, {"content", "a"}},
          {{"role", "assistant"},
           {"content", {{{"type", "tool_use"}, {"id", "a"}, {"name", "f"}, {"input", ordered_json::object()}}}}}},
         "messages");
  refuse("thinking", {{"type", "enabled"}, {"budget_tokens", 100}}, "thinking.budget_tokens");
  refuse("thinking", {{"type", "enabled"}}, "thinking.budget_tokens", kMissingField);
  refuse("thinking", {{"type", "enabled"}, {"budget_tokens", 1024}}, "thinking.budget_tokens", kConflict);
  expect_refused(
      anthropic::parse_messages,
      with(with(base, "max_tokens", 2048).dump().c_str(), "thinking", {{"type", "enabled"}, {"budget_tokens", 2048}}),
      "thinking.budget_tokens", kConflict);
  refuse("tools", {{{"type", "bash_20250124"}, {"name", "bash"}}}, "tools[0].type");
  refuse("tools", {{{"name", "f"}}}, "tools[0].input_schema", kMissingField);
  refuse("tools", {{{"name", "f"}, {"input_schema", {{"type", "array"}}}}}, "tools[0].input_schema.type");
  refuse("tool_choice", {{"type", "any"}}, "tool_choice", kConflict);
  refuse("tool_choice", {{"type", "tool"}}, "tool_choice.name", kMissingField);
  refuse("temperature", 1.5, "temperature");
  refuse("stop_sequences", {""}, "stop_sequences[0]");
  refuse("container", "c", "container", kUnsupported);
  refuse("mcp_servers", {{{"type", "url"}}}, "mcp_servers", kUnsupported);
  const auto reply = anthropic::parse_messages("{", served_model());
  ASSERT_FALSE(reply.ok());
  const ordered_json error = ordered_json::parse(anthropic_error_body(reply.error()));
  EXPECT_EQ(error["type"], "error");
  EXPECT_EQ(error["error"]["type"], "invalid_request_error");
}

TEST(TokenizeRequest, TextsAndConversations) {
  const openai::TokenizeRequest text =
      parsed(openai::parse_tokenize, R"({"prompt":"a","add_special_tokens":false,"return_token_strs":true})");
  EXPECT_EQ(std::get<std::string>(text.input), "a");
  EXPECT_TRUE(text.shows_tokens);
  EXPECT_FALSE(text.adds_begin_token);
  const openai::TokenizeRequest chat =
      parsed(openai::parse_tokenize, R"({"model":"tiny","messages":[{"role":"user","content":"Q"}]})");
  EXPECT_EQ(std::get<ChatRequest>(chat.input).messages[0].content, "Q");
  expect_refused(openai::parse_tokenize, ordered_json::object(), "prompt", kConflict);
  expect_refused(openai::parse_tokenize, {{"prompt", 3}}, "prompt");
  EXPECT_EQ(parsed(openai::parse_detokenize, R"({"tokens":[1,2]})"), (std::vector<int32_t>{1, 2}));
  expect_refused(openai::parse_detokenize, {{"tokens", {1, 1000}}}, "tokens[1]");
  expect_refused(openai::parse_detokenize, {{"tokens", "a"}}, "tokens");
  const std::vector<int32_t> ids = {1, 2};
  const std::vector<std::string> texts = {"a", "\xff"};
  EXPECT_EQ(openai::render_tokenize(ids, texts, 64),
            "{\"count\":2,\"max_model_len\":64,\"tokens\":[1,2],\"token_strs\":[\"a\",\"\uFFFD\"]}");
  EXPECT_EQ(openai::render_detokenize("a"), "{\"prompt\":\"a\"}");
}

}  // namespace
}  // namespace tessera::server
