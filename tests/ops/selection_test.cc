// SPDX-License-Identifier: Apache-2.0
// router, index scores, top-k, compressor and sampling.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "base/error.h"
#include "ops/backend.h"
#include "ops/reference_rows.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

const float kInf = std::numeric_limits<float>::infinity();

TEST(Router, PublishedValues) {
  const std::pair<float, float> known[] = {{-20, 4.5399930e-05f}, {-5, 0.0819472299f}, {-1, 0.5596978538f},
                                           {0, 0.8325546112f},    {1, 1.1459763032f},  {5, 2.2375690712f},
                                           {30, 5.4772255751f}};
  for (const auto& [x, value] : known) EXPECT_NEAR(ops::sqrt_softplus(x), value, 1e-6f * value);
  const float logits[4] = {0.3f, -1.2f, 2, 0.7f}, bias[4] = {0, 0.9f, -0.5f, 0.1f};
  int32_t ids[2];
  float weights[2];
  device::Queue queue(1);
  ops::router_reference({.num_experts = 4, .top_k = 2, .scaling = 1.5f},
                        {.logits = logits, .bias = bias, .experts = ids, .weights = weights, .num_tokens = 1}, queue);
  EXPECT_EQ(ids[0], 1);
  EXPECT_EQ(ids[1], 3);
  EXPECT_NEAR(weights[0], 0.4922909, 1e-6);
  EXPECT_NEAR(weights[1], 1.0077091, 1e-6);
}

TEST(Router, TiesNanUnderflowAndTable) {
  device::Queue queue(1);
  int32_t ids[2];
  float weights[2];
  const float zeros[4] = {}, flat[4] = {1, 1, 1, 1}, with_nan[4] = {std::nanf(""), -5, std::nanf(""), -6},
              tiny[4] = {-1000, -1000, -1000, -1000};
  const ops::Router::Desc desc{.num_experts = 4, .top_k = 2, .scaling = 1};
  ops::router_reference(desc, {.logits = flat, .bias = zeros, .experts = ids, .weights = weights, .num_tokens = 1},
                        queue);
  EXPECT_TRUE(ids[0] == 0 && ids[1] == 1) << "ties go to the lower id";
  ops::router_reference(desc, {.logits = with_nan, .bias = zeros, .experts = ids, .weights = weights, .num_tokens = 1},
                        queue);
  EXPECT_TRUE(ids[0] == 1 && ids[1] == 3) << "NaN never wins";
  const int32_t table[4] = {3, 1, 2, 0}, tokens[1] = {1}, none[1] = {-1};
  ops::Router::Desc hashed = desc;
  hashed.is_hashed = true;
  ops::router_reference(
      hashed,
      {.logits = tiny, .table = table, .token_ids = tokens, .experts = ids, .weights = weights, .num_tokens = 1},
      queue);
  EXPECT_TRUE(ids[0] == 0 && ids[1] == 2) << "the table's row, ascending";
  EXPECT_TRUE(std::isfinite(weights[0]) && std::isfinite(weights[1])) << "0/0 is guarded";
  ops::router_reference(
      hashed, {.logits = tiny, .table = table, .token_ids = none, .experts = ids, .weights = weights, .num_tokens = 1},
      queue);
  EXPECT_TRUE(ids[0] == 1 && ids[1] == 3) << "no token is as token 0";
}

class SelectionTest : public testing::RandomTest {
 protected:
  device::Queue queue_{2};
};

TEST_F(SelectionTest, TopKAgainstASort) {
  for (int round = 0; round < 300; ++round) {
    const int64_t count = static_cast<int64_t>(rng_.below(40)), k = 1 + static_cast<int64_t>(rng_.below(12));
    std::vector<float> scores(static_cast<size_t>(count + 1));
    for (float& score : scores) {
      score = static_cast<float>(rng_.below(6)) - 3;  // many ties
      if (rng_.below(15) == 0) score = std::nanf("");
      if (rng_.below(15) == 0) score = -kInf;
    }
    std::vector<int32_t> expected(static_cast<size_t>(count));
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
      const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
      return !std::isnan(x) && (std::isnan(y) || x > y);
    });
    expected.resize(static_cast<size_t>(std::min(k, count)));
    std::sort(expected.begin(), expected.end());
    expected.resize(static_cast<size_t>(k), -1);
    std::vector<int32_t> selected(static_cast<size_t>(k), 77);
    const int32_t visible = static_cast<int32_t>(count);
    ops::top_k_reference({.k = k},
                         {.scores = scores.data(),
                          .stride = count + 1,
                          .counts = &visible,
                          .selected = selected.data(),
                          .num_tokens = 1},
                         queue_);
    EXPECT_EQ(selected, expected) << count << " " << k;
  }
}

TEST_F(SelectionTest, IndexScoresAgainstDouble) {
  constexpr int64_t kTokens = 3, kHeads = 6, kWidth = 64, kKeys = 150;
  for (const ops::EntryFormat format : {ops::EntryFormat::kF32, ops::EntryFormat::kIndexFp4}) {
    const ops::IndexScores::Desc desc{
        .heads = kHeads, .width = kWidth, .keys = {format, kWidth, 0}, .activation = DType::kF32};
    std::vector<float> keys = testing::adversarial(rng_, kKeys, kWidth),
                       q = testing::adversarial(rng_, kTokens * kHeads, kWidth),
                       w = testing::adversarial(rng_, kTokens, kHeads);
    std::vector<uint8_t> cache(static_cast<size_t>(kKeys * desc.keys.entry_bytes()));
    for (int64_t j = 0; j < kKeys; ++j) {
      ops::encode_entry(desc.keys, keys.data() + j * kWidth, cache.data() + j * desc.keys.entry_bytes());
      ops::decode_entry(desc.keys, cache.data() + j * desc.keys.entry_bytes(), keys.data() + j * kWidth);
    }
    const int32_t counts[kTokens] = {0, 65, 150};
    testing::for_each_variant<ops::IndexScores>(desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
      testing::PoisonedTensor out(DType::kF32, {kTokens, kKeys});
      variant.run(desc,
                  {.queries = {q.data(), DType::kF32, {kTokens, kHeads, kWidth}},
                   .weights = {w.data(), DType::kF32, {kTokens, kHeads}},
                   .keys = cache.data(),
                   .counts = counts,
                   .stride = kKeys,
                   .scores = out.view().as<float>(),
                   .num_tokens = kTokens},
                  queue_);
      const std::vector<float> found = out.floats();
      EXPECT_TRUE(out.is_guard_intact());
      for (int64_t t = 0; t < kTokens; ++t) {
        std::vector<float> expected;
        for (int64_t j = 0; j < counts[t]; ++j) {
          double score = 0;
          for (int64_t h = 0; h < kHeads; ++h) {
            double product = 0;
            for (int64_t c = 0; c < kWidth; ++c)
              product += static_cast<double>(q[static_cast<size_t>((t * kHeads + h) * kWidth + c)]) *
                         static_cast<double>(keys[static_cast<size_t>(j * kWidth + c)]);
            score += static_cast<double>(w[static_cast<size_t>(t * kHeads + h)]) /
                     std::sqrt(static_cast<double>(kHeads * kWidth)) * std::max(product, 0.0);
          }
          expected.push_back(static_cast<float>(score));
        }
        EXPECT_TRUE(testing::is_close(std::span(found).subspan(static_cast<size_t>(t * kKeys), expected.size()),
                                      expected, 1e-5))
            << t;
        for (int64_t j = counts[t]; j < kKeys; ++j)
          EXPECT_TRUE(std::isnan(found[static_cast<size_t>(t * kKeys + j)])) << "untouched past the count";
      }
    });
  }
}

// Entries by the definition: a softmax over the window's rows per channel, in double.
TEST_F(SelectionTest, CompressorAgainstTheDefinitionAndAnyChunking) {
  constexpr int64_t kWidth = 24;
  for (const int64_t ratio : {int64_t{4}, int64_t{128}}) {
    const ops::CompressorPool::Desc desc{.ratio = ratio, .width = kWidth, .activation = DType::kF32};
    const int64_t row = desc.row_width(), tokens = 3 * ratio + 2, entries = tokens / ratio;
    const std::vector<float> values = testing::adversarial(rng_, tokens, row),
                             gates = testing::adversarial(rng_, tokens, row),
                             ape = testing::adversarial(rng_, ratio, row);
    std::vector<float> expected;
    for (int64_t j = 0; j < entries; ++j) {
      for (int64_t c = 0; c < kWidth; ++c) {
        std::vector<double> a, s;
        const auto add = [&](int64_t t, int64_t channel) {
          a.push_back(static_cast<double>(values[static_cast<size_t>(t * row + channel)]));
          s.push_back(static_cast<double>(gates[static_cast<size_t>(t * row + channel)] +
                                          ape[static_cast<size_t>(t % ratio * row + channel)]));
        };
        for (int64_t t = (j - 1) * ratio; ratio == 4 && j > 0 && t < j * ratio; ++t) add(t, c);
        for (int64_t t = j * ratio; t < (j + 1) * ratio; ++t) add(t, ratio == 4 ? kWidth + c : c);
        const double max = *std::max_element(s.begin(), s.end());
        double sum = 0, weighted = 0;
        for (size_t i = 0; i < s.size(); ++i) sum += std::exp(s[i] - max), weighted += std::exp(s[i] - max) * a[i];
        expected.push_back(static_cast<float>(weighted / sum));
      }
    }
    testing::for_each_variant<ops::CompressorPool>(desc, [&](const ops::Variant<ops::CompressorPool>& variant, bool) {
      const auto run = [&](auto&& next_chunk) {
        std::vector<float> state(static_cast<size_t>(desc.state_floats()), std::nanf("")), out;
        ops::compressor_reset(desc, state.data());
        for (int64_t at = 0; at < tokens;) {
          const int64_t count = std::min(tokens - at, next_chunk()), made = ops::entries_completed(ratio, at, count);
          testing::PoisonedTensor part(DType::kF32, {ops::most_completed(ratio, count), kWidth});
          const ops::CompressorSlice slice{.num_rows = static_cast<int32_t>(count), .first_position = at};
          variant.run(desc,
                      {.values = values.data() + at * row,
                       .gates = gates.data() + at * row,
                       .ape = ape.data(),
                       .state = state.data(),
                       .slices = &slice,
                       .num_slices = 1,
                       .entries = part.view()},
                      queue_);
          EXPECT_TRUE(part.is_guard_intact());
          const std::vector<float> made_values = part.floats();
          const auto rest = made_values.begin() + made * kWidth;
          out.insert(out.end(), made_values.begin(), rest);
          EXPECT_TRUE(std::all_of(rest, made_values.end(), [](float value) { return value == 0; })) << "not completed";
          at += count;
        }
        return out;
      };
      const std::vector<float> at_once = run([&] { return tokens; });
      EXPECT_TRUE(testing::is_close(at_once, expected, 5e-6)) << "ratio " << ratio;
      EXPECT_TRUE(testing::same_bits(run([] { return int64_t{1}; }), at_once)) << "one by one";
      EXPECT_TRUE(testing::same_bits(
          run([&] { return 1 + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(ratio) + 3)); }), at_once))
          << "random chunks";
    });
  }
  EXPECT_EQ(ops::entries_completed(4, 2, 2), 1);
  EXPECT_EQ(ops::entries_completed(128, 127, 1), 1);
  EXPECT_EQ(ops::entries_completed(128, 0, 127), 0);
}

class SampleTest : public testing::RandomTest {
 protected:
  int32_t draw(std::vector<float> logits, const ops::SamplingParams& params, uint64_t position,
               const std::vector<int32_t>& counts = {}, std::vector<std::pair<int32_t, float>> bias = {}) {
    const ops::Sample::Desc desc{.vocab = static_cast<int64_t>(logits.size())};
    device::Buffer workspace(static_cast<size_t>(ops::sample_reference_workspace(desc, 1)));
    std::vector<int32_t> ids;
    std::vector<float> values;
    for (const auto& [id, value] : bias) ids.push_back(id), values.push_back(value);
    int32_t token = -2;
    device::Queue queue(1);
    const ops::SampleRow row{.params = params, .position = position};
    ops::sample_reference(desc,
                          {.logits = logits.data(),
                           .rows = &row,
                           .num_rows = 1,
                           .counts = counts.empty() ? nullptr : counts.data(),
                           .bias_ids = ids.data(),
                           .bias_values = values.data(),
                           .num_bias = static_cast<int64_t>(ids.size()),
                           .tokens = &token,
                           .workspace = workspace.data()},
                          queue);
    return token;
  }
  // How often each token is drawn over positions 0..n-1.
  std::map<int32_t, int> histogram(const std::vector<float>& logits, const ops::SamplingParams& params, int n) {
    std::map<int32_t, int> counts;
    for (int i = 0; i < n; ++i) ++counts[draw(logits, params, static_cast<uint64_t>(i))];
    return counts;
  }
};

TEST_F(SampleTest, GreedyTakesTheLargestAndTheLowerIdAtATie) {
  EXPECT_EQ(draw({1, 3, 3, 2}, {}, 0), 1);
  EXPECT_EQ(draw({std::nanf(""), -kInf, -5, -6}, {}, 0), 2);
  EXPECT_EQ(draw({std::nanf(""), -kInf}, {}, 0), -1) << "nothing to draw";
}

TEST_F(SampleTest, FollowsTheDistribution) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  const auto all = histogram(logits, {.temperature = 1, .seed = 5}, 20000);
  for (const auto& [id, p] : {std::pair<int32_t, double>{0, 0.5}, {1, 0.3}, {2, 0.15}, {3, 0.05}})
    EXPECT_NEAR(all.at(id) / 20000.0, p, 0.015) << id;
  const auto hot = histogram(logits, {.temperature = 0.5f, .seed = 6}, 20000);  // squares of probabilities, normalised
  EXPECT_NEAR(hot.at(0) / 20000.0, 0.25 / 0.365, 0.015);
}

TEST_F(SampleTest, TopKTopPAndMinPCutTheTail) {
  const std::vector<float> logits = {std::log(0.05f), std::log(0.5f), std::log(0.3f), std::log(0.15f)};
  EXPECT_EQ(histogram(logits, {.temperature = 1, .top_k = 2}, 500).size(), 2u);
  EXPECT_EQ(histogram(logits, {.temperature = 1, .top_p = 0.5f}, 500).size(), 1u)
      << "the shortest prefix that reaches it";
  EXPECT_EQ(histogram(logits, {.temperature = 1, .top_p = 0.51f}, 500).size(), 2u);
  EXPECT_EQ(histogram(logits, {.temperature = 1, .min_p = 0.25f}, 500).size(), 3u);
  EXPECT_EQ(histogram(logits, {.temperature = 1, .min_p = 1}, 500).size(), 1u);
  EXPECT_EQ(histogram({2, 2, 2, 2}, {.temperature = 1, .top_k = 1}, 50).begin()->first, 0) << "ties: the lower id";
}

TEST_F(SampleTest, SeedAndPositionDecideAlone) {
  std::vector<float> logits(100);
  for (float& logit : logits) logit = rng_.normal();
  int same = 0;
  for (uint64_t position = 0; position < 200; ++position) {
    const int32_t token = draw(logits, {.temperature = 1, .seed = 9}, position);
    EXPECT_EQ(draw(logits, {.temperature = 1, .seed = 9}, position), token);
    same += draw(logits, {.temperature = 1, .seed = 10}, position) == token;
  }
  EXPECT_LT(same, 50) << "another seed draws otherwise";
}

TEST_F(SampleTest, BiasAndPenalties) {
  EXPECT_EQ(draw({1, 2, 3}, {}, 0, {}, {{0, 5.0f}}), 0);
  EXPECT_EQ(draw({1, 2, 3}, {}, 0, {}, {{2, -kInf}}), 1);
  EXPECT_EQ(draw({1, 2, 3}, {.repetition_penalty = 2}, 0, {0, 0, 1}), 1) << "3 / 2 < 2";
  EXPECT_EQ(draw({-1, -3, -1.5f}, {.repetition_penalty = 2}, 0, {1, 0, 0}), 2) << "-1 * 2 < -1.5";
  EXPECT_EQ(draw({1, 2, 3}, {.presence_penalty = 1.5f}, 0, {0, 0, 4}), 1);
  EXPECT_EQ(draw({1, 2, 3}, {.frequency_penalty = 0.3f}, 0, {0, 0, 4}), 1);
  EXPECT_EQ(draw({1, 2, 3}, {.frequency_penalty = 0.2f}, 0, {0, 0, 4}), 2);
}

}  // namespace
}  // namespace tessera
