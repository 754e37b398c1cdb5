// SPDX-License-Identifier: Apache-2.0
// Tokens to answers and their rendering: any cutting gives the same answer, and a stream's chunks add up to it.
#include "server/answer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "answers.h"
#include "base/json.h"
#include "base/strings.h"
#include "server/anthropic/messages_response.h"
#include "server/openai/chat_response.h"
#include "server/openai/completion_response.h"
#include "server/openai/json_parts.h"
#include "server/openai/responses_request.h"
#include "server/openai/responses_response.h"
#include "server/sse.h"
#include "testing/seed.h"

namespace tessera::server {
namespace {

using nlohmann::ordered_json;

const openai::AnswerHead kHead = {"chatcmpl_1", "tiny", 1700000000, "fp"};
const Usage kUsage = {100, 60, 7, 3};
constexpr int kRounds = 400;

const char kCallText[] =
    "Hm.</think>On it.\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinvoke name=\"add\">\n"
    "<\uFF5CDSML\uFF5Cparameter name=\"a\" string=\"false\">2</\uFF5CDSML\uFF5Cparameter>\n"
    "<\uFF5CDSML\uFF5Cparameter name=\"s\" string=\"true\">\u00e9\"</\uFF5CDSML\uFF5Cparameter>\n"
    "</\uFF5CDSML\uFF5Cinvoke>\n</\uFF5CDSML\uFF5Ctool_calls>";

void expect_same(const FinishedAnswer& a, const FinishedAnswer& b) {
  EXPECT_EQ(a.reasoning, b.reasoning);
  EXPECT_EQ(a.content, b.content);
  EXPECT_EQ(a.reason, b.reason);
  EXPECT_EQ(a.stop_string, b.stop_string);
  ASSERT_EQ(a.calls.size(), b.calls.size());
  for (size_t i = 0; i < a.calls.size(); ++i) {
    EXPECT_EQ(a.calls[i].name, b.calls[i].name);
    EXPECT_EQ(a.calls[i].arguments, b.calls[i].arguments);
    EXPECT_EQ(a.calls[i].is_complete, b.calls[i].is_complete);
  }
}

// Adds a chunk's delta to a message: strings are joined, calls go to their index.
void add_chunk(ordered_json& message, const ordered_json& delta) {
  for (const char* key : {"content", "reasoning_content"}) {
    if (delta.contains(key)) message[key] = message.value(key, "") + delta[key].get<std::string>();
  }
  if (!delta.contains("tool_calls")) return;
  for (const ordered_json& call : delta["tool_calls"]) {
    const size_t index = call["index"];
    if (call.contains("id")) {
      ASSERT_EQ(index, message.contains("tool_calls") ? message["tool_calls"].size() : 0);
      message["tool_calls"][index] = {{"id", call["id"]},
                                      {"type", "function"},
                                      {"function", {{"name", call["function"]["name"]}, {"arguments", ""}}}};
    }
    std::string& arguments = message["tool_calls"][index]["function"]["arguments"].get_ref<std::string&>();
    arguments += call["function"]["arguments"].get<std::string>();
  }
}

TEST(Answer, ChatStreamAddsUpToTheWholeAnswer) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int num_calls = 0, num_stops = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Sampled sampled = random_answer(random);
    SCOPED_TRACE(sampled.text);
    const openai::ChatStream stream(kHead, true, true);
    std::string lines = stream.begin(0);
    std::vector<AnswerDelta> deltas;
    const FinishedAnswer answer =
        drive(sampled, cut(sampled.text, random, 1 + random() % 12), options_of(sampled, true),
              [&](const AnswerDelta& delta) { deltas.push_back(delta); });
    for (size_t i = 0; i + 1 < deltas.size(); ++i) lines += stream.delta(0, deltas[i]);
    lines += stream.end(0, deltas.back(), answer.reason);
    lines += stream.usage(kUsage) + std::string(kSseDone);
    expect_same(answer, finished(sampled, options_of(sampled)));
    num_calls += !answer.calls.empty();
    num_stops += !answer.stop_string.empty();

    const std::vector<ordered_json> chunks = data_lines(lines);
    ASSERT_GE(chunks.size(), 4u);
    EXPECT_EQ(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    EXPECT_EQ(chunks.back(), "[DONE]");
    const ordered_json& usage = chunks[chunks.size() - 2];
    EXPECT_TRUE(usage["choices"].empty());
    EXPECT_EQ(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 60);
    EXPECT_EQ(usage["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);
    ordered_json message = {{"content", ""}}, logprobs = ordered_json::array(), reasoning_logprobs = logprobs;
    for (size_t i = 0; i + 2 < chunks.size(); ++i) {
      EXPECT_TRUE(chunks[i]["usage"].is_null());
      const ordered_json& choice = chunks[i]["choices"][0];
      add_chunk(message, choice["delta"]);
      const bool is_last = i + 3 == chunks.size();
      EXPECT_EQ(choice["finish_reason"].is_null(), !is_last);
      if (choice["logprobs"].is_null()) continue;
      for (const ordered_json& item : choice["logprobs"]["content"]) logprobs.push_back(item);
      if (!choice["logprobs"].contains("reasoning_content")) continue;
      for (const ordered_json& item : choice["logprobs"]["reasoning_content"]) reasoning_logprobs.push_back(item);
    }
    const ordered_json whole = ordered_json::parse(openai::render_chat(kHead, {&answer, 1}, kUsage, true));
    const ordered_json& choice = whole["choices"][0];
    EXPECT_EQ(chunks[chunks.size() - 3]["choices"][0]["finish_reason"], choice["finish_reason"]);
    ordered_json expected = choice["message"];
    if (expected["content"].is_null()) expected["content"] = "";
    EXPECT_EQ(message["content"], expected["content"]);
    EXPECT_EQ(message.value("reasoning_content", ""), expected.value("reasoning_content", ""));
    EXPECT_EQ(message.value("tool_calls", ordered_json()), expected.value("tool_calls", ordered_json()));
    EXPECT_EQ(logprobs, choice["logprobs"]["content"]);
    EXPECT_EQ(reasoning_logprobs, choice["logprobs"].value("reasoning_content", ordered_json::array()));
  }
  EXPECT_GT(num_calls, 20);
  EXPECT_GT(num_stops, 0);
}

TEST(Answer, ChatResponseGolden) {
  const Sampled sampled = {kCallText, true, Ending::kEndToken, {}};
  const FinishedAnswer answer = finished(sampled, options_of(sampled));
  EXPECT_EQ(ordered_json::parse(openai::render_chat(kHead, {&answer, 1}, kUsage, false)), ordered_json::parse(R"({
    "id": "chatcmpl_1", "object": "chat.completion", "created": 1700000000, "model": "tiny", "system_fingerprint": "fp",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "On it.", "refusal": null,
      "reasoning_content": "Hm.", "tool_calls": [{"id": "call_1", "type": "function",
        "function": {"name": "add", "arguments": "{\"a\": 2, \"s\": \"\u00e9\\\"\"}"}}]},
      "logprobs": null, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107,
      "prompt_tokens_details": {"cached_tokens": 60}, "completion_tokens_details": {"reasoning_tokens": 3},
      "prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40}})"));
  const openai::ChatStream stream({"c", "m", 1, ""}, false, false);
  AnswerDelta delta;
  EXPECT_EQ(stream.delta(2, delta), "");
  delta.content = "\u00e9\n";
  EXPECT_EQ(stream.delta(2, delta),
            "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":"
            "[{\"index\":2,\"delta\":{\"content\":\"\u00e9\\n\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
  ApiError error = internal_error("device lost");
  EXPECT_EQ(stream.error(error),
            "data: {\"error\":{\"message\":\"device lost\",\"type\":\"server_error\",\"param\":null,"
            "\"code\":\"internal_error\"}}\n\n");
}

TEST(Answer, ArgumentsGrowByAppendingAndEndAsJson) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    const Sampled sampled = random_answer(random);
    std::vector<AnswerCall> calls;
    const FinishedAnswer answer =
        drive(sampled, cut(sampled.text, random, 3), options_of(sampled), [&](const AnswerDelta& delta) {
          for (const CallDelta& call : delta.calls) {
            if (call.begins) calls.push_back({call.id, call.name, "", false});
            ASSERT_EQ(call.index, calls.size() - 1);
            EXPECT_FALSE(calls.back().is_complete);
            calls.back().arguments += call.arguments;
            calls.back().is_complete = call.ends;
            EXPECT_TRUE(is_valid_utf8(call.arguments));
          }
          EXPECT_TRUE(is_valid_utf8(delta.content));
        });
    ASSERT_EQ(calls.size(), answer.calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].arguments, answer.calls[i].arguments);
      EXPECT_EQ(calls[i].id, answer.calls[i].id);
      if (calls[i].is_complete) {
        EXPECT_EQ(Json::parse_exact(calls[i].arguments, "arguments").kind(), Json::Kind::kObject);
      }
    }
  }
}

TEST(Answer, StopsLookAtContentOnly) {
  Sampled sampled = {"stop</think>a stop b", true, Ending::kEndToken, {"stop"}};
  FinishedAnswer answer = finished(sampled, options_of(sampled));
  EXPECT_EQ(answer.reasoning, "stop");
  EXPECT_EQ(answer.content, "a ");
  EXPECT_EQ(answer.stop_string, "stop");
  EXPECT_EQ(answer.reason, FinishReason::kStop);
  // A beginning of a stop string that comes to nothing is content after all, before calls too.
  sampled = {std::string("a sto") + (kCallText + 17), false, Ending::kEndToken, {"stop"}};
  answer = finished(sampled, options_of(sampled));
  EXPECT_EQ(answer.content, "a sto");
  EXPECT_EQ(answer.reason, FinishReason::kToolCalls);
}

TEST(Answer, OneCallWhereOneIsAllowed) {
  std::mt19937 random(1);
  Sampled sampled;
  sampled.text = "\n\n" + std::string(text::kToolCallsTag) + ">\n" + random_call(random) + random_call(random) +
                 std::string(text::kEndToolCallsTag);
  AnswerOptions options = options_of(sampled);
  EXPECT_EQ(finished(sampled, options).calls.size(), 2u);
  options.allows_parallel_calls = false;
  const FinishedAnswer answer = finished(sampled, options);
  EXPECT_EQ(answer.calls.size(), 1u);
  EXPECT_EQ(answer.reason, FinishReason::kToolCalls);
}

TEST(Answer, CountsReasoningTokens) {
  CountedIds ids;
  AnswerOptions options;
  options.starts_in_reasoning = true;
  AnswerAssembler assembler(options, ids);
  for (const char* token : {"I", " think", "</think>", "Yes", "."}) assembler.push(token);
  assembler.finish(Ending::kEndToken);
  EXPECT_EQ(assembler.answer().num_tokens, 5);
  EXPECT_EQ(assembler.answer().num_reasoning_tokens, 3);
  EXPECT_EQ(assembler.answer().content, "Yes.");
  Usage usage;
  usage.add(assembler.answer());
  EXPECT_EQ(usage.num_reasoning_tokens, 3);
}

TEST(Answer, CompletionStreamAddsUp) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    Sampled sampled = random_answer(random);
    AnswerOptions options = options_of(sampled, true);
    options.is_chat = false;
    openai::CompletionStream stream(kHead, true, false);
    std::vector<AnswerDelta> deltas;
    const FinishedAnswer answer = drive(sampled, cut(sampled.text, random, 5), options,
                                        [&](const AnswerDelta& delta) { deltas.push_back(delta); });
    std::string lines;
    for (size_t i = 0; i + 1 < deltas.size(); ++i) lines += stream.delta(0, deltas[i]);
    lines += stream.end(0, deltas.back(), answer.reason);
    const ordered_json whole = ordered_json::parse(openai::render_completion(kHead, {&answer, 1}, kUsage, true));
    std::string text;
    ordered_json logprobs = {{"tokens", ordered_json::array()},
                             {"token_logprobs", ordered_json::array()},
                             {"top_logprobs", ordered_json::array()},
                             {"text_offset", ordered_json::array()}};
    for (const ordered_json& chunk : data_lines(lines)) {
      text += chunk["choices"][0]["text"].get<std::string>();
      if (chunk["choices"][0]["logprobs"].is_null()) continue;
      for (auto& [key, list] : logprobs.items()) {
        for (const ordered_json& item : chunk["choices"][0]["logprobs"][key]) list.push_back(item);
      }
    }
    EXPECT_EQ(text, whole["choices"][0]["text"]);
    EXPECT_EQ(logprobs, whole["choices"][0]["logprobs"]);
    if (answer.stop_string.empty()) {
      EXPECT_EQ(text, replace_invalid_utf8(sampled.text));
    }
  }
}

// What lm-eval reads: the prompt's tokens come first, the very first without a log probability.
TEST(Answer, EchoedPromptWithLogprobs) {
  CountedIds ids;
  AnswerOptions options;
  options.is_chat = false;
  options.keeps_logprobs = true;
  options.stops = {"A"};
  AnswerAssembler assembler(options, ids);
  TokenLogprob first = token_logprob("A", std::nan("")), second = token_logprob("\u00e9", -1, "x", -0.5);
  first.top.clear();
  second.top.erase(second.top.begin());
  const TokenLogprob third = token_logprob("c", -INFINITY);
  assembler.push_echo("A", &first);
  assembler.push_echo("\u00e9", &second);
  assembler.push("c", &third);
  assembler.finish(Ending::kLength);
  const ordered_json whole =
      ordered_json::parse(openai::render_completion(kHead, {&assembler.answer(), 1}, kUsage, true));
  EXPECT_EQ(whole["choices"][0], ordered_json::parse(R"({"index": 0, "text": "A\u00e9c", "logprobs": {
    "tokens": ["A", "\u00e9", "c"], "token_logprobs": [null, -1.0, -9999.0],
    "top_logprobs": [null, {"x": -0.5, "\u00e9": -1.0}, {"c": -9999.0}], "text_offset": [0, 1, 2]},
    "finish_reason": "length"})"));
  EXPECT_EQ(assembler.answer().num_tokens, 1);
}

TEST(Answer, ResponsesStreamAddsUp) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    const Sampled sampled = random_answer(random);
    SCOPED_TRACE(sampled.text);
    openai::ResponsesStream stream({"resp_9", "tiny", 5, ""}, "{\"tools\": []}", false);
    std::string lines = stream.begin();
    std::vector<AnswerDelta> deltas;
    const FinishedAnswer answer = drive(sampled, cut(sampled.text, random, 6), options_of(sampled),
                                        [&](const AnswerDelta& delta) { deltas.push_back(delta); });
    for (size_t i = 0; i + 1 < deltas.size(); ++i) lines += stream.delta(deltas[i]);
    lines += stream.end(deltas.back(), answer, kUsage);
    ordered_json items = ordered_json::array(), texts = ordered_json::object();
    int64_t sequence = 0;
    const std::vector<ordered_json> events = data_lines(lines);
    for (const ordered_json& event : events) {
      EXPECT_EQ(event["sequence_number"], sequence++);
      const std::string type = event["type"];
      if (type.ends_with(".delta")) {
        std::string& text = texts.emplace(event["item_id"].get<std::string>(), "").first->get_ref<std::string&>();
        text += event["delta"].get<std::string>();
      } else if (type == "response.output_item.added") {
        EXPECT_EQ(event["output_index"], items.size());
      } else if (type == "response.output_item.done") {
        items.push_back(event["item"]);
      } else if (type.ends_with("text.done")) {
        EXPECT_EQ(event["text"], texts.value(event["item_id"].get<std::string>(), ""));
      } else if (type == "response.function_call_arguments.done") {
        EXPECT_EQ(event["arguments"], texts.value(event["item_id"].get<std::string>(), ""));
      }
    }
    const ordered_json whole = ordered_json::parse(
        openai::render_response({"resp_9", "tiny", 5, ""}, "{\"tools\": []}", answer, kUsage, false));
    EXPECT_EQ(events[0]["type"], "response.created");
    EXPECT_EQ(events.back()["response"], whole);
    EXPECT_EQ(events.back()["type"].get<std::string>(), "response." + whole["status"].get<std::string>());
    EXPECT_EQ(items, whole["output"]);
  }
}

TEST(Answer, MessageStreamAddsUp) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    const Sampled sampled = random_answer(random);
    SCOPED_TRACE(sampled.text);
    anthropic::MessageStream stream("msg_1", "tiny");
    Usage prompt = kUsage;
    prompt.num_completion_tokens = 0;
    std::string lines = stream.begin(prompt) + anthropic::MessageStream::ping();
    std::vector<AnswerDelta> deltas;
    const FinishedAnswer answer = drive(sampled, cut(sampled.text, random, 6), options_of(sampled),
                                        [&](const AnswerDelta& delta) { deltas.push_back(delta); });
    for (size_t i = 0; i + 1 < deltas.size(); ++i) lines += stream.delta(deltas[i]);
    lines += stream.end(deltas.back(), answer, kUsage);

    ordered_json message, inputs = ordered_json::object();
    bool is_open = false;
    const std::vector<ordered_json> events = data_lines(lines);
    for (const ordered_json& event : events) {
      const std::string type = event["type"];
      if (type == "message_start") {
        message = event["message"];
        EXPECT_EQ(message["usage"]["input_tokens"], 40);
      } else if (type == "content_block_start") {
        EXPECT_FALSE(is_open);
        is_open = true;
        EXPECT_EQ(event["index"], message["content"].size());
        message["content"].push_back(event["content_block"]);
      } else if (type == "content_block_delta") {
        EXPECT_TRUE(is_open);
        ordered_json& block = message["content"].back();
        const ordered_json& delta = event["delta"];
        if (delta["type"] == "text_delta")
          block["text"] = block["text"].get<std::string>() + delta["text"].get<std::string>();
        if (delta["type"] == "signature_delta") block["signature"] = delta["signature"];
        if (delta["type"] == "thinking_delta") {
          block["thinking"] = block["thinking"].get<std::string>() + delta["thinking"].get<std::string>();
        }
        if (delta["type"] == "input_json_delta") {
          const std::string index = std::to_string(event["index"].get<int>());
          inputs[index] = inputs.value(index, "") + delta["partial_json"].get<std::string>();
        }
      } else if (type == "content_block_stop") {
        is_open = false;
        const std::string index = std::to_string(event["index"].get<int>());
        if (!inputs.contains(index)) continue;
        const ordered_json input = ordered_json::parse(inputs[index].get<std::string>(), nullptr, false);
        message["content"].back()["input"] = input;
      } else if (type == "message_delta") {
        message.update(event["delta"]);
        message["usage"] = event["usage"];
      }
    }
    EXPECT_EQ(events.back()["type"], "message_stop");
    ordered_json blocks = ordered_json::array();
    for (const ordered_json& block : message["content"]) {
      if (!block.contains("input") || !block["input"].is_discarded()) blocks.push_back(block);
    }
    message["content"] = blocks;
    EXPECT_EQ(message, ordered_json::parse(anthropic::render_message("msg_1", "tiny", answer, kUsage)));
  }
}

TEST(Answer, MessageGolden) {
  const Sampled sampled = {kCallText, true, Ending::kEndToken, {}};
  AnswerOptions options = options_of(sampled);
  options.call_id_prefix = "toolu_";
  const FinishedAnswer answer = finished(sampled, options);
  EXPECT_EQ(ordered_json::parse(anthropic::render_message("msg_1", "tiny", answer, kUsage)), ordered_json::parse(R"({
    "id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "content": [
      {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "text", "text": "On it."},
      {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "s": "\u00e9\""}}],
    "stop_reason": "tool_use", "stop_sequence": null, "usage": {"input_tokens": 40, "cache_creation_input_tokens": 0,
      "cache_read_input_tokens": 60, "output_tokens": 7}})"));
  const Sampled stopped = {"a stop", false, Ending::kEndToken, {"stop"}};
  const ordered_json message =
      ordered_json::parse(anthropic::render_message("m", "t", finished(stopped, options_of(stopped)), kUsage));
  EXPECT_EQ(message["stop_reason"], "stop_sequence");
  EXPECT_EQ(message["stop_sequence"], "stop");
  EXPECT_EQ(anthropic::MessageStream::ping(), "event: ping\ndata: {\"type\":\"ping\"}\n\n");
  EXPECT_EQ(anthropic::MessageStream::error(overloaded("queue", 5, 5)),
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\",\"message\":\"queue: "
            "expected room for this request, found 5 of 5 taken\"}}\n\n");
  EXPECT_EQ(anthropic::render_count(12), "{\"input_tokens\":12}");
}

// Integers of any size are JSON; they come back digit by digit, from a request and from the model.
TEST(WholeAnswers, KeepIntegersThatNoMachineHolds) {
  const std::string digits(400, '9');
  const auto request = openai::parse_responses(
      R"({"model":"tiny","input":"hi","tools":[{"type":"function","name":"f","parameters":{"maximum":)" + digits +
          "}}]}",
      served_model());
  ASSERT_TRUE(request.ok()) << request.error().message;
  FinishedAnswer answer;
  answer.content = "hello";
  const openai::AnswerHead head{"resp_1", "tiny", 5, ""};
  const std::string body = openai::render_response(head, request.value().repeated, answer, kUsage, false);
  EXPECT_NE(body.find(digits), std::string::npos);
  EXPECT_EQ(Json::parse_exact(body, "body").find("object")->string(), "response");
  openai::ResponsesStream stream(head, request.value().repeated, false);
  const std::string events = stream.begin() + stream.end({}, answer, kUsage);
  EXPECT_NE(events.find(digits), std::string::npos);

  FinishedAnswer calling;
  calling.calls = {{"toolu_1", "f", "{\"a\": " + digits + "}", true}, {"toolu_2", "g", "{}", true}};
  calling.reason = FinishReason::kToolCalls;
  const std::string message = anthropic::render_message("msg_1", "tiny", calling, kUsage);
  EXPECT_NE(message.find("\"input\":{\"a\": " + digits + "}}"), std::string::npos) << message;
  EXPECT_EQ(Json::parse_exact(message, "message").find("content")->array().size(), 2u);
}

}  // namespace
}  // namespace tessera::server
