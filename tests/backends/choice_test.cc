// SPDX-License-Identifier: Apache-2.0
// Router and sampling: every variant against the reference, at the sizes of Flash and Pro.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "testing/op_harness.h"

namespace tessera {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class ChoiceTest : public testing::RandomTest {
 protected:
  std::vector<float> normals(int64_t count, float scale) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = rng_.normal() * scale;
    return values;
  }
  void check_router(const ops::Router::Desc& desc, const std::vector<float>& logits, const std::vector<float>& bias);
  // The reference's token, and every other variant's must be the same.
  void check_sample(const std::vector<float>& logits, const ops::SamplingParams& params,
                    const std::vector<int32_t>& counts);
};

void ChoiceTest::check_router(const ops::Router::Desc& desc, const std::vector<float>& logits,
                              const std::vector<float>& bias) {
  constexpr int64_t kVocab = 50;
  const int64_t tokens = static_cast<int64_t>(logits.size()) / desc.num_experts;
  std::vector<int32_t> table, token_ids;
  for (int64_t row = 0; row < kVocab; ++row) {
    const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(desc.num_experts)));
    for (int64_t i = 0; i < desc.top_k; ++i)
      table.push_back(static_cast<int32_t>((first + 7 * i) % desc.num_experts));  // distinct, not ascending
  }
  for (int64_t t = 0; t < tokens; ++t) token_ids.push_back(static_cast<int32_t>(rng_.below(kVocab)));
  const size_t size = static_cast<size_t>(tokens * desc.top_k);
  const auto run = [&](auto&& function, int64_t first, int64_t count) {
    std::pair<std::vector<int32_t>, std::vector<float>> out;
    out.first.resize(static_cast<size_t>(count * desc.top_k), -7);
    out.second.resize(out.first.size(), kNan);
    device::Queue queue(2);
    function(desc,
             ops::Router::Args{.logits = logits.data() + first * desc.num_experts,
                               .bias = bias.data(),
                               .table = desc.is_hashed ? table.data() : nullptr,
                               .token_ids = token_ids.data() + first,
                               .experts = out.first.data(),
                               .weights = out.second.data(),
                               .num_tokens = count},
             queue);
    return out;
  };
  const auto expected = run(ops::router_reference, 0, tokens);
  testing::for_each_variant<ops::Router>(desc, [&](const ops::Variant<ops::Router>& variant, bool) {
    const auto all = run(variant.run, 0, tokens);
    for (size_t i = 0; i < size; ++i) {
      if (all.first[i] == expected.first[i]) {
        EXPECT_NEAR(all.second[i], expected.second[i], 1e-5f * std::fabs(expected.second[i]) + 1e-12f) << i;
        continue;
      }
      // Another choice is explained by scores that differ by no more than their rounding.
      const int64_t t = static_cast<int64_t>(i) / desc.top_k;
      const auto score = [&](int32_t e) {
        return ops::sqrt_softplus(logits[static_cast<size_t>(t * desc.num_experts + e)]) + bias[static_cast<size_t>(e)];
      };
      EXPECT_NEAR(score(all.first[i]), score(expected.first[i]), 1e-6f) << "token " << t;
    }
    for (const int64_t count : {int64_t{1}, tokens / 2}) {
      const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(tokens - count + 1)));
      const auto part = run(variant.run, first, count);
      EXPECT_TRUE(std::equal(part.first.begin(), part.first.end(), all.first.begin() + first * desc.top_k));
      EXPECT_TRUE(testing::same_bits(
          part.second, std::span(all.second).subspan(static_cast<size_t>(first * desc.top_k), part.second.size())));
    }
  });
}

TEST_F(ChoiceTest, Router) {
  constexpr int64_t kTokens = 66;
  for (const auto& [num_experts, top_k] : {std::pair<int64_t, int64_t>{256, 6}, {384, 8}, {6, 6}, {9, 1}}) {
    for (const bool is_hashed : {false, true}) {
      const ops::Router::Desc desc{.num_experts = num_experts,
                                   .top_k = is_hashed ? std::min<int64_t>(top_k, 3) : top_k,
                                   .is_hashed = is_hashed,
                                   .is_normalized = num_experts != 384,
                                   .scaling = 1.5f};
      check_router(desc, normals(kTokens * num_experts, 3), normals(num_experts, 0.1f));
      std::vector<float> logits = normals(kTokens * num_experts, 2);
      for (float& logit : logits) {
        logit = std::round(logit);  // many ties
        if (rng_.below(30) == 0) logit = rng_.below(2) == 0 ? -200.0f : 90.0f;
      }
      check_router(desc, logits, std::vector<float>(static_cast<size_t>(num_experts)));
    }
  }
}

void ChoiceTest::check_sample(const std::vector<float>& logits, const ops::SamplingParams& params,
                              const std::vector<int32_t>& counts) {
  const ops::Sample::Desc desc{.vocab = static_cast<int64_t>(logits.size())};
  const int32_t bias_ids[3] = {0, static_cast<int32_t>(desc.vocab - 1), 0};
  const float bias_values[3] = {1, -2, 0.5f};
  const uint64_t position = rng_.next_u32();
  const auto run = [&](const ops::Variant<ops::Sample>& variant) {
    std::vector<float> mine = logits;
    const device::Buffer workspace = testing::workspace_for(variant, desc, 1);
    int32_t token = -7;
    device::Queue queue(1);
    variant.run(desc,
                {.logits = mine.data(),
                 .params = params,
                 .position = position,
                 .counts = counts.empty() ? nullptr : counts.data(),
                 .bias_ids = bias_ids,
                 .bias_values = bias_values,
                 .num_bias = 3,
                 .token = &token,
                 .workspace = workspace.data()},
                queue);
    return token;
  };
  const ops::Variant<ops::Sample> scalar{"scalar", nullptr, nullptr, ops::sample_reference_workspace,
                                         ops::sample_reference};
  const int32_t expected = run(scalar);
  testing::for_each_variant<ops::Sample>(desc, [&](const ops::Variant<ops::Sample>& variant, bool is_ref) {
    if (is_ref) return;
    EXPECT_EQ(run(variant), expected) << "position " << position;
  });
}

TEST_F(ChoiceTest, Sample) {
  for (const int64_t vocab : {1, 2, 5, 1000, 1025, 129280}) {
    for (int round = 0; round < (vocab > 2000 ? 3 : 12); ++round) {
      std::vector<float> logits = normals(vocab, 3);
      for (float& logit : logits) {
        if (rng_.below(4) == 0) logit = std::round(logit);
        if (vocab > 2 && rng_.below(50) == 0) logit = rng_.below(2) == 0 ? kNan : -kInfinity;
      }
      logits[static_cast<size_t>(rng_.below(static_cast<uint64_t>(vocab)))] = 4;
      std::vector<int32_t> counts;
      for (int64_t i = 0; round % 2 == 0 && i < vocab; ++i) counts.push_back(rng_.below(4) == 0 ? 2 : 0);
      check_sample(logits,
                   {.temperature = round % 3 == 0 ? 0.0f : 0.5f + rng_.uniform(),
                    .top_p = round % 4 == 1 ? 0.7f : 1.0f,
                    .min_p = round % 5 == 2 ? 0.05f : 0.0f,
                    .top_k = static_cast<int32_t>(rng_.below(2) * rng_.below(static_cast<uint64_t>(vocab) + 2)),
                    .repetition_penalty = 1.3f,
                    .frequency_penalty = 0.1f,
                    .presence_penalty = 0.2f,
                    .seed = rng_.next_u64()},
                   counts);
    }
  }
}

// A GPU can't throw.
TEST_F(ChoiceTest, NothingToSampleOnAGpu) {
  const ops::Sample::Desc desc{.vocab = 3};
  testing::for_each_variant<ops::Sample>(desc, [&](const ops::Variant<ops::Sample>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    float logits[3] = {kNan, -kInfinity, kNan};
    const device::Buffer workspace = testing::workspace_for(variant, desc, 1);
    int32_t token = 0;
    device::Queue queue(1);
    variant.run(desc, {.logits = logits, .params = {.temperature = 1}, .token = &token, .workspace = workspace.data()},
                queue);
    EXPECT_EQ(token, -1);
  });
}

}  // namespace
}  // namespace tessera
