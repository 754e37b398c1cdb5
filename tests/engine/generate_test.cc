// SPDX-License-Identifier: Apache-2.0
// The one-sequence loop with a runner made for the test.
#include "engine/generate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "engine/fake_runner.h"

namespace tessera::engine {
namespace {

TEST(Generate, PrefillsInChunksThenDecodes) {
  FakeRunner runner;
  Watcher watcher;
  const std::vector<int32_t> prompt = {9, 9, 9, 9, 9, 9, 9, 9, 9, 3};
  const GenerateResult result = generate(runner, prompt, {.max_tokens = 3}, watcher, nullptr);
  EXPECT_EQ(result.ids, (std::vector<int32_t>{7, 15, 31}));
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  EXPECT_EQ(runner.chunks, (std::vector<size_t>{4, 4, 2, 1, 1})) << "the last token drawn is not run";
  EXPECT_TRUE(watcher.positions.empty());
  EXPECT_EQ(runner.num_rows, 0) << "nobody asked for logits";
  EXPECT_EQ(result.num_prompt_tokens, 10);
  EXPECT_EQ(watcher.tokens, result.ids);
}

TEST(Generate, CancelledInPrefillSaysSo) {
  FakeRunner runner;
  Watcher watcher;
  watcher.cancel = true;
  const std::vector<int32_t> prompt(10, 9);
  for (const int64_t max_tokens : {0, 3}) {
    const GenerateResult result =
        generate(runner, prompt, {.max_tokens = max_tokens, .cancel = &watcher.cancel}, watcher, nullptr);
    EXPECT_EQ(result.finish_reason, FinishReason::kCancelled);
    EXPECT_EQ(result.num_prompt_tokens, 0) << "only what was run";
    EXPECT_TRUE(result.ids.empty());
  }
}

TEST(Generate, EndTokensStopUnlessToldOtherwise) {
  FakeRunner runner;
  Watcher watcher, other;
  const std::vector<int32_t> prompt = {25};  // then 1, an end token
  GenerateResult result = generate(runner, prompt, {.max_tokens = 5}, watcher, nullptr);
  EXPECT_EQ(result.ids, (std::vector<int32_t>{1}));
  EXPECT_EQ(result.finish_reason, FinishReason::kEndOfText);
  EXPECT_EQ(to_string(result.finish_reason), "stop");
  result = generate(runner, prompt, {.max_tokens = 3, .stop_at_end_token = false}, other, nullptr);
  EXPECT_EQ(result.ids, (std::vector<int32_t>{1, 3, 7}));
}

TEST(Generate, ObserverAndCancelEndIt) {
  FakeRunner runner;
  Watcher stopping, cancelling;
  stopping.stop_at = 2;
  EXPECT_EQ(generate(runner, std::vector<int32_t>{3}, {.max_tokens = 9}, stopping, nullptr).finish_reason,
            FinishReason::kStop);
  EXPECT_EQ(stopping.tokens.size(), 2u);
  cancelling.cancel_at = 3;
  const GenerateResult result =
      generate(runner, std::vector<int32_t>{3}, {.max_tokens = 9, .cancel = &cancelling.cancel}, cancelling, nullptr);
  EXPECT_EQ(result.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(result.ids.size(), 3u) << "what was made stays";
  std::atomic<bool> already{true};
  Watcher none;
  EXPECT_TRUE(generate(runner, std::vector<int32_t>{3}, {.cancel = &already}, none, nullptr).ids.empty());
}

TEST(Generate, TheLongestSequenceIsTheEnd) {
  FakeRunner runner;
  Watcher watcher;
  const GenerateResult result = generate(runner, std::vector<int32_t>(38, 3), {.max_tokens = 100}, watcher, nullptr);
  EXPECT_EQ(result.ids.size(), 2u);
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  try {
    generate(runner, std::vector<int32_t>(41, 3), {}, watcher, nullptr);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("40"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("41"), std::string::npos) << error.what();
  }
}

TEST(Generate, PromptAloneAndAllLogits) {
  FakeRunner runner;
  Watcher watcher;
  watcher.wants = true;
  const GenerateResult result =
      generate(runner, std::vector<int32_t>{3, 4, 5, 6, 7}, {.max_tokens = 0}, watcher, nullptr);
  EXPECT_TRUE(result.ids.empty());
  EXPECT_EQ(watcher.positions, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(Generate, BadRequestsAreRefused) {
  FakeRunner runner;
  Watcher watcher;
  const auto refused = [&](const std::vector<int32_t>& prompt, GenerateOptions options) {
    try {
      generate(runner, prompt, options, watcher, nullptr);
    } catch (const Error& error) {
      return error.code() == ErrorCode::kInvalidArgument;
    }
    return false;
  };
  EXPECT_TRUE(refused({}, {}));
  EXPECT_TRUE(refused({-1}, {}));
  EXPECT_TRUE(refused({kVocab}, {}));
  EXPECT_TRUE(refused({3}, {.max_tokens = -1}));
  for (const model::SamplingParams& params :
       std::initializer_list<model::SamplingParams>{{.temperature = -1},
                                                    {.temperature = std::nanf("")},
                                                    {.temperature = INFINITY},
                                                    {.top_p = 0},
                                                    {.top_p = 1.5f},
                                                    {.top_p = std::nanf("")},
                                                    {.min_p = -0.1f},
                                                    {.min_p = 2},
                                                    {.top_k = -1},
                                                    {.repetition_penalty = 0},
                                                    {.repetition_penalty = std::nanf("")},
                                                    {.frequency_penalty = INFINITY},
                                                    {.presence_penalty = std::nanf("")}}) {
    EXPECT_TRUE(refused({3}, {.sampling = {.params = params}}));
  }
  EXPECT_TRUE(refused({3}, {.sampling = {.logit_bias = {{kVocab, 1.0f}}}}));
  EXPECT_TRUE(refused({3}, {.sampling = {.logit_bias = {{-1, 1.0f}}}}));
  EXPECT_TRUE(refused({3}, {.sampling = {.logit_bias = {{1, std::nanf("")}}}}));
  EXPECT_TRUE(refused({3}, {.sampling = {.logit_bias = std::vector<std::pair<int32_t, float>>(2000, {1, 1.0f})}}));
}

TEST(Generate, ASeedRepeats) {
  FakeRunner runner;
  const auto run = [&](uint64_t seed) {
    Watcher watcher;
    GenerateOptions options{.max_tokens = 30, .stop_at_end_token = false};
    options.sampling.params = {.temperature = 2, .seed = seed};
    return generate(runner, std::vector<int32_t>{3}, options, watcher, nullptr).ids;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(Generate, PenaltiesCountPromptAndAnswer) {
  FakeRunner runner;
  Watcher watcher;
  GenerateOptions options{.max_tokens = 2};
  options.sampling.params.presence_penalty = 0.5f;
  generate(runner, std::vector<int32_t>{3, 3}, options, watcher, nullptr);
  ASSERT_EQ(runner.counts.size(), static_cast<size_t>(kVocab));
  EXPECT_EQ(runner.counts[3], 2);
  EXPECT_EQ(runner.counts[7], 1);
}

}  // namespace
}  // namespace tessera::engine
