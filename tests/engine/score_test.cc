// SPDX-License-Identifier: Apache-2.0
#include "engine/score.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/fake_runner.h"

namespace tessera::engine {
namespace {

TEST(Score, LikelihoodOfOneToken) {
  const std::vector<float> even(8, -3.0f);
  EXPECT_NEAR(negative_log_likelihood(even, 5), std::log(8.0), 1e-12);
  const std::vector<float> large = {1e30f, 1e30f, -1e30f};
  EXPECT_NEAR(negative_log_likelihood(large, 1), std::log(2.0), 1e-12) << "no overflow";
  EXPECT_GT(negative_log_likelihood(large, 2), 1e30);
}

// The fake runner's next token leads by 3: its probability is e^3 / (e^3 + 49).
TEST(Score, TextIsScoredTokenByToken) {
  FakeRunner runner;
  const double sum = std::exp(3.0) + kVocab - 1;
  const double likely = std::log(sum) - 3, unlikely = std::log(sum);
  const std::vector<int32_t> ids = {3, 7, 15, 31, 4, 9, 10};  // 7, 15, 31 and 9 follow; 4 and 10 do not
  const TextScore score = score_text(runner, ids, nullptr, nullptr);
  EXPECT_EQ(score.num_tokens, 6);
  EXPECT_NEAR(score.nats, 4 * likely + 2 * unlikely, 1e-9);
  EXPECT_NEAR(score.perplexity(), std::exp(score.nats / 6), 1e-9);
  EXPECT_EQ(runner.chunks, (std::vector<size_t>{4, 3}));
}

TEST(Score, OneTokenHasNothingToScore) {
  FakeRunner runner;
  const TextScore score = score_text(runner, std::vector<int32_t>{3}, nullptr, nullptr);
  EXPECT_EQ(score.num_tokens, 0);
  EXPECT_EQ(score.perplexity(), 1);
}

TEST(Score, CancelEndsIt) {
  FakeRunner runner;
  const std::atomic<bool> cancel{true};
  EXPECT_EQ(score_text(runner, std::vector<int32_t>{3, 7, 15}, nullptr, &cancel).num_tokens, 0);
  EXPECT_TRUE(runner.chunks.empty());
}

}  // namespace
}  // namespace tessera::engine
