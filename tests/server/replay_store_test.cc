// SPDX-License-Identifier: Apache-2.0
// Past calls come back as they were sampled, byte for byte, where the client did not change them.
#include "server/replay_store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "answers.h"
#include "testing/seed.h"
#include "text/chat/encode.h"

namespace tessera::server {
namespace {

using nlohmann::ordered_json;

std::vector<text::Message> conversation(const FinishedAnswer& answer) {
  std::vector<text::Message> messages(3);
  messages[0].role = text::Role::kSystem;
  messages[0].tools = {"{\"name\": \"f0\"}"};
  messages[1].content = "Q";
  messages[2].role = text::Role::kAssistant;
  messages[2].content = answer.content;
  for (const AnswerCall& call : answer.calls) messages[2].tool_calls.push_back({call.id, call.name, call.arguments});
  for (const AnswerCall& call : answer.calls) {
    text::Message& result = messages.emplace_back();
    result.role = text::Role::kTool;
    result.tool_call_id = call.id;
    result.content = "done";
  }
  return messages;
}

// The arguments as another program might write them: compact, keys sorted.
void rewrite(std::vector<text::Message>& messages) {
  for (text::ToolCall& call : messages[2].tool_calls) {
    call.arguments = nlohmann::json::parse(call.arguments).dump();
  }
}

TEST(ReplayStore, PromptsContinueWhatWasSampled) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int num_restored = 0;
  for (int round = 0; round < 1000; ++round) {
    const Sampled sampled = random_answer(random);
    SCOPED_TRACE(sampled.text);
    const FinishedAnswer answer = finished(sampled, options_of(sampled));
    ReplayStore store(1 << 20);
    store.remember("me", sampled.starts_in_reasoning, answer);
    if (store.stats().num_answers == 0) continue;
    std::vector<text::Message> messages = conversation(answer);
    text::ChatOptions options;
    options.thinking = sampled.starts_in_reasoning ? text::Thinking::kOn : text::Thinking::kOff;
    const std::string prompt = text::render_chat(std::span(messages).first(2), options).text;
    rewrite(messages);
    store.restore("me", messages);
    EXPECT_EQ(store.stats().num_hits, 1u);
    std::string expected = prompt + sampled.text;
    if (!expected.ends_with(text::kEosToken)) expected += text::kEosToken;
    const std::string rendered = text::render_chat(messages, options).text;
    EXPECT_TRUE(rendered.starts_with(expected)) << rendered;
    ++num_restored;
  }
  EXPECT_GT(num_restored, 50);
}

FinishedAnswer answer_with(const std::string& id, const std::string& arguments, size_t padding = 0) {
  FinishedAnswer answer;
  answer.reason = FinishReason::kToolCalls;
  answer.content = "c";
  answer.calls = {{id, "f", arguments, true}};
  answer.sampled_text =
      fmt::format("c\n\n{}{}>\n{}", std::string(padding, 'x'), text::kEndInvokeTag, text::kEndToolCallsTag);
  return answer;
}

bool restores(ReplayStore& store, const std::string& owner, const std::string& id, const std::string& name,
              const std::string& arguments) {
  std::vector<text::Message> messages(1);
  messages[0].role = text::Role::kAssistant;
  messages[0].tool_calls = {{id, name, arguments}};
  store.restore(owner, messages);
  return !messages[0].sampled_calls.empty();
}

TEST(ReplayStore, OnlyForTheSameCallOfTheSameOwner) {
  ReplayStore store(1 << 20);
  store.remember("me", false, answer_with("call_1", R"({"a": 1.0, "b": [1, {"x": "y"}]})"));
  EXPECT_TRUE(restores(store, "me", "call_1", "f", R"({"b":[1.0,{"x":"y"}],"a":1})"));
  EXPECT_FALSE(restores(store, "you", "call_1", "f", R"({"b":[1,{"x":"y"}],"a":1})"));
  EXPECT_FALSE(restores(store, "me", "call_2", "f", R"({"b":[1,{"x":"y"}],"a":1})"));
  EXPECT_FALSE(restores(store, "me", "call_1", "g", R"({"b":[1,{"x":"y"}],"a":1})"));
  EXPECT_FALSE(restores(store, "me", "call_1", "f", R"({"b":[1,{"x":"y"}],"a":2})"));
  EXPECT_FALSE(restores(store, "me", "call_1", "f", R"({"b":[1,{"x":"y"}]})"));
  EXPECT_FALSE(restores(store, "me", "call_1", "f", "not JSON"));
  // One of two calls, or two in another order, are another message.
  FinishedAnswer two = answer_with("call_3", "{}");
  two.calls.push_back({"call_4", "f", "{}", true});
  store.remember("me", false, two);
  EXPECT_FALSE(restores(store, "me", "call_3", "f", "{}"));
  EXPECT_EQ(store.stats().num_hits, 1u);
  EXPECT_EQ(store.stats().num_misses, 7u);
}

TEST(ReplayStore, KeepsOnlyWhatRendersBack) {
  ReplayStore store(1 << 20);
  FinishedAnswer answer = answer_with("call_1", "{}");
  answer.sampled_text = "other" + answer.sampled_text;
  store.remember("me", false, answer);
  answer = answer_with("call_1", "{}");
  answer.reason = FinishReason::kLength;
  store.remember("me", false, answer);
  answer = answer_with("call_1", "{}");
  answer.parse_fault = "something";
  store.remember("me", false, answer);
  EXPECT_EQ(store.stats().num_answers, 0u);
  EXPECT_EQ(store.stats().num_bytes, 0u);
}

// Where one call is allowed, its end ends the answer, wherever in the block's end the token ends that has it.
TEST(ReplayStore, ABlockThatEndedWithItsOneCallIsClosed) {
  const std::string full = answer_with("call_1", "{}").sampled_text;
  const size_t end = full.rfind(text::kEndInvokeTag) + text::kEndInvokeTag.size();
  for (size_t size = end - 1; size <= full.size(); ++size) {
    ReplayStore store(1 << 20);
    FinishedAnswer answer = answer_with("call_1", "{}");
    answer.sampled_text.resize(size);
    store.remember("me", false, answer);
    std::vector<text::Message> messages(1);
    messages[0].role = text::Role::kAssistant;
    messages[0].tool_calls = {{"call_1", "f", "{}"}};
    store.restore("me", messages);
    EXPECT_EQ(messages[0].sampled_calls, size < end ? "" : full.substr(1)) << size;
  }
}

TEST(ReplayStore, ForgetsTheOldestWithinItsBytes) {
  constexpr size_t kMaxBytes = 10000;
  ReplayStore store(kMaxBytes);
  for (int i = 0; i < 100; ++i) {
    store.remember("me", false, answer_with("call_" + std::to_string(i), "{}", 1000));
    EXPECT_LE(store.stats().num_bytes, kMaxBytes);
    EXPECT_TRUE(restores(store, "me", "call_0", "f", "{}")) << i;  // used last, so kept
  }
  EXPECT_FALSE(restores(store, "me", "call_50", "f", "{}"));
  EXPECT_TRUE(restores(store, "me", "call_99", "f", "{}"));
  store.remember("me", false, answer_with("call_big", "{}", kMaxBytes));
  EXPECT_FALSE(restores(store, "me", "call_big", "f", "{}"));
}

TEST(RandomIds, AreLongAndDiffer) {
  RandomIds ids;
  const std::string a = ids.next("call_"), b = ids.next("call_");
  EXPECT_EQ(a.size(), 5u + 32);
  EXPECT_TRUE(a.starts_with("call_"));
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace tessera::server
