// SPDX-License-Identifier: Apache-2.0
// Turns of a conversation on one state: what is run again, and that answers do not depend on it.
#include "engine/conversation.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "base/error.h"
#include "engine/fake_runner.h"
#include "testing/seed.h"

namespace tessera::engine {
namespace {

size_t num_run(const FakeRunner& runner) {
  return std::accumulate(runner.chunks.begin(), runner.chunks.end(), size_t{0});
}

std::vector<int32_t> answer(Conversation& conversation, const std::vector<int32_t>& prompt, int64_t max_tokens = 3) {
  Watcher watcher;
  return conversation.answer(prompt, {.max_tokens = max_tokens}, watcher, nullptr).ids;
}

TEST(Conversation, RunsOnlyWhatIsNew) {
  FakeRunner runner;
  Conversation conversation(runner, 40);
  std::vector<int32_t> prompt = {9, 9, 9, 9, 9, 3};
  EXPECT_EQ(answer(conversation, prompt), (std::vector<int32_t>{7, 15, 31}));
  EXPECT_EQ(conversation.num_reused(), 0);
  EXPECT_EQ(conversation.num_tokens(), 8) << "the last token drawn is not run";
  for (const int32_t id : {7, 15, 31, 8, 5}) prompt.push_back(id);
  runner.chunks.clear();
  EXPECT_EQ(answer(conversation, prompt), (std::vector<int32_t>{11, 23, 47}));
  EXPECT_EQ(conversation.num_reused(), 8);
  EXPECT_EQ(num_run(runner), 3u + 2u);
  EXPECT_EQ(runner.last_seen.size(), prompt.size() + 2);
}

TEST(Conversation, AnswerThatIsWrittenDifferentlyIsRunAgainFromItsBeginning) {
  FakeRunner runner;
  Conversation conversation(runner, 40);
  answer(conversation, {9, 9, 9, 9, 9, 6, 3});  // 3 opens the answer, as <think> does
  runner.chunks.clear();
  EXPECT_EQ(answer(conversation, {9, 9, 9, 9, 9, 6, 4, 8, 5}), (std::vector<int32_t>{11, 23, 47}));
  EXPECT_EQ(conversation.num_reused(), 6) << "the mark before the prompt's last token";
  EXPECT_EQ(runner.last_seen, (std::vector<int32_t>{9, 9, 9, 9, 9, 6, 4, 8, 5, 11, 23}));
}

TEST(Conversation, SamePromptAgainRunsOneToken) {
  FakeRunner runner;
  Conversation conversation(runner, 40);
  const std::vector<int32_t> prompt = {9, 9, 9, 9, 9, 6, 3};
  const std::vector<int32_t> first = answer(conversation, prompt);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(answer(conversation, prompt), first);
    EXPECT_EQ(conversation.num_reused(), 6);
  }
}

TEST(Conversation, OtherBeginningsStartAfresh) {
  FakeRunner runner;
  Conversation conversation(runner, 40);
  answer(conversation, {9, 9, 9, 3});
  EXPECT_EQ(answer(conversation, {8, 9, 9, 3}), (std::vector<int32_t>{7, 15, 31}));
  EXPECT_EQ(conversation.num_reused(), 0);
  EXPECT_EQ(answer(conversation, {8}), (std::vector<int32_t>{17, 35, 21})) << "shorter than what was seen";
  conversation.clear();
  EXPECT_EQ(conversation.num_tokens(), 0);
  answer(conversation, {8, 9});
  EXPECT_EQ(conversation.num_reused(), 0);
}

TEST(Conversation, IsFullAtItsCapacity) {
  FakeRunner runner;
  Conversation conversation(runner, 6);
  Watcher watcher;
  const GenerateResult result =
      conversation.answer(std::vector<int32_t>{9, 9, 9, 3}, {.max_tokens = 9}, watcher, nullptr);
  EXPECT_EQ(result.ids.size(), 2u);
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  EXPECT_THROW(answer(conversation, {9, 9, 9, 3, 7, 15, 8}), Error);
  EXPECT_EQ(answer(conversation, {9, 9, 9, 3}, 1), (std::vector<int32_t>{7})) << "usable afterwards";
}

TEST(Conversation, StoppedAnswersAreKept) {
  FakeRunner runner;
  Conversation conversation(runner, 40);
  Watcher watcher;
  watcher.cancel_at = 2;
  EXPECT_EQ(
      conversation.answer(std::vector<int32_t>{9, 9, 3}, {.max_tokens = 9, .cancel = &watcher.cancel}, watcher, nullptr)
          .finish_reason,
      FinishReason::kCancelled);
  EXPECT_EQ(answer(conversation, {9, 9, 3, 7, 15, 5}), (std::vector<int32_t>{11, 23, 47}));
  EXPECT_EQ(conversation.num_reused(), 4);
  // Stopped inside the prompt: the state holds a part of it.
  Watcher early;
  std::atomic<bool> already{true};
  conversation.answer(std::vector<int32_t>{8, 8, 8, 8, 8, 8, 3}, {.max_tokens = 9, .cancel = &already}, early, nullptr);
  EXPECT_EQ(answer(conversation, {8, 8, 8, 8, 8, 8, 3}), (std::vector<int32_t>{7, 15, 31}));
}

// Any walk of prompts gives the answers of fresh states, and the state has seen exactly prompt and answer.
TEST(Conversation, RandomWalksAnswerAsFreshStates) {
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int walk = 0; walk < 50; ++walk) {
    FakeRunner runner, fresh_runner;
    Conversation conversation(runner, 40);
    std::vector<int32_t> prompt = {5};
    for (int turn = 0; turn < 8; ++turn) {
      prompt.resize(1 + random() % prompt.size());
      while (prompt.size() < 30 && random() % 4 != 0) prompt.push_back(static_cast<int32_t>(3 + random() % 5));
      Watcher watcher;
      const GenerateOptions options{.max_tokens = static_cast<int64_t>(random() % 6)};
      const std::vector<int32_t> expected = generate(fresh_runner, prompt, options, watcher, nullptr).ids;
      ASSERT_EQ(conversation.answer(prompt, options, watcher, nullptr).ids, expected);
      ASSERT_EQ(runner.last_seen, fresh_runner.last_seen);
      prompt.insert(prompt.end(), expected.begin(), expected.end());
      prompt.resize(std::min<size_t>(prompt.size(), 30));
    }
  }
}

}  // namespace
}  // namespace tessera::engine
