// SPDX-License-Identifier: Apache-2.0
// Router and sampling at the sizes of Flash and Pro: every variant makes the reference's choice and weights, bit for
// bit, on ties, near ties, NaN and infinities (docs/contracts/numerics.md, section 5).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "base/error.h"
#include "ops/backend.h"
#include "ops/sample/sample.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class RouterTest : public testing::RandomTest {
 protected:
  enum class Fill { kNormal, kTies, kNearTies, kFar, kNotFinite };

  std::vector<float> logits(Fill fill, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = 2 * rng_.normal();
      if (fill == Fill::kTies) value = std::round(value);
      // Some units in the last place apart: nearer than vectors tell.
      if (fill == Fill::kNearTies) value = 1 + static_cast<float>(rng_.below(20)) * 0x1p-23f;
      if (fill == Fill::kFar) value *= 60;
      if (fill == Fill::kNotFinite && rng_.below(30) == 0) {
        value = rng_.below(2) == 0 ? std::nanf("") : rng_.below(2) == 0 ? kInf : -kInf;
      }
    }
    return values;
  }

  // A GPU's log1p and exp are not the host's: weights are near, and where the choices differ, the experts that only one
  // of them has scores that differ by no more than their rounding. (Ids ascend, so places say nothing.)
  using Choice = std::pair<std::vector<int32_t>, std::vector<float>>;
  static void expect_near(const ops::Router::Desc& desc, const std::vector<float>& logits,
                          const std::vector<float>& bias, const Choice& found, const Choice& expected) {
    const auto width = static_cast<size_t>(desc.top_k), experts = static_cast<size_t>(desc.num_experts);
    for (size_t begin = 0; begin < found.first.size(); begin += width) {
      const size_t t = begin / width;
      const std::span<const int32_t> mine(&found.first[begin], width), theirs(&expected.first[begin], width);
      const auto only_in = [&](std::span<const int32_t> some, std::span<const int32_t> others) {
        std::vector<float> scores;
        for (const int32_t e : some) {
          if (std::find(others.begin(), others.end(), e) != others.end()) continue;
          const auto id = static_cast<size_t>(e);
          scores.push_back(ops::sqrt_softplus(logits[t * experts + id]) + bias[id]);
        }
        std::sort(scores.begin(), scores.end());
        return scores;
      };
      const std::vector<float> ours = only_in(mine, theirs), others = only_in(theirs, mine);
      ASSERT_EQ(ours.size(), others.size()) << "token " << t << ": an expert twice";
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_NEAR(ours[i], others[i], 1e-6f * std::max(1.0f, std::fabs(others[i]))) << "token " << t;
      }
      for (size_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(std::find(theirs.begin(), theirs.end(), mine[i]) - theirs.begin());
        if (at == width || std::isnan(expected.second[begin + at])) continue;
        const float weight = expected.second[begin + at];
        EXPECT_NEAR(found.second[begin + i], weight, 1e-5f * std::fabs(weight) + 1e-12f) << "token " << t;
      }
    }
  }

  void check(const ops::Router::Desc& desc, Fill fill, float bias_size) {
    constexpr int64_t kTokens = 67, kVocab = 50;
    const std::vector<float> rows = logits(fill, kTokens * desc.num_experts);
    std::vector<float> bias(static_cast<size_t>(desc.num_experts));
    for (float& value : bias) value = bias_size * rng_.normal();
    std::vector<int32_t> table, tokens;
    for (int64_t i = 0; i < kVocab; ++i) {
      const auto first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(desc.num_experts)));
      for (int64_t j = 0; j < desc.top_k; ++j) table.push_back(static_cast<int32_t>((first + j) % desc.num_experts));
    }
    for (int64_t t = 0; t < kTokens; ++t) tokens.push_back(static_cast<int32_t>(rng_.below(kVocab + 1)) - 1);
    const auto run = [&](auto&& call) {
      Choice out;
      out.first.assign(static_cast<size_t>(kTokens * desc.top_k), -7);
      out.second.assign(out.first.size(), std::nanf(""));
      call(ops::Router::Args{.logits = rows.data(),
                             .bias = bias.data(),
                             .table = table.data(),
                             .token_ids = tokens.data(),
                             .experts = out.first.data(),
                             .weights = out.second.data(),
                             .num_tokens = kTokens});
      return out;
    };
    device::Queue one(1);
    const auto expected = run([&](const auto& args) { ops::router_reference(desc, args, one); });
    int compared = 0;
    testing::for_each_variant<ops::Router>(desc, [&](const ops::Variant<ops::Router>& variant, bool is_ref) {
      compared += is_ref ? 0 : 1;
      device::Queue queue(1 + static_cast<int>(rng_.below(4)));
      const auto found = run([&](const auto& args) { variant.run(desc, args, queue); });
      if (testing::is_on_gpu(variant)) {
        expect_near(desc, rows, bias, found, expected);
        return;
      }
      EXPECT_EQ(found.first, expected.first);
      EXPECT_TRUE(testing::same_bits(found.second, expected.second));
    });
    // Of whole registers of experts CPUs have variants of their own, GPUs of any number.
    if (device::probe_machine().cpu.avx2 && desc.num_experts % 16 == 0) {
      EXPECT_GT(compared, 0);
    }
  }
};

TEST_F(RouterTest, ChoosesAsTheReference) {
  for (const int64_t experts : {16, 48, 256, 257, 384, 512, 513, 608}) {
    for (const Fill fill : {Fill::kNormal, Fill::kTies, Fill::kNearTies, Fill::kFar, Fill::kNotFinite}) {
      for (const float bias : {0.0f, 1e-7f, 0.1f, 10.0f}) {
        SCOPED_TRACE(::testing::Message()
                     << experts << " experts, fill " << static_cast<int>(fill) << ", bias " << bias);
        check({.num_experts = experts, .top_k = 6, .scaling = 1.5f}, fill, bias);
      }
    }
    check({.num_experts = experts, .top_k = 1, .is_normalized = false}, Fill::kTies, 0);
    check({.num_experts = experts, .top_k = 16}, Fill::kNearTies, 1e-6f);
    check({.num_experts = experts, .top_k = 6, .is_hashed = true}, Fill::kFar, 0);
  }
}

class SampleVariantsTest : public testing::RandomTest {
 protected:
  std::vector<float> logits(int64_t vocab, uint64_t kind) {
    std::vector<float> values(static_cast<size_t>(vocab));
    for (float& value : values) {
      value = rng_.normal() * (kind == 0 ? 2.0f : kind == 1 ? 8.0f : 0.01f);
      if (kind == 3) value = std::round(value * 300);
      if (kind == 4) value = 1.25f;
      if (kind == 5 && rng_.below(3) == 0) value = rng_.below(2) == 0 ? std::nanf("") : -kInf;
      if (kind == 6) value = value > 0 ? 0.0f : -0.0f;
    }
    if (kind == 0) {
      for (int i = 0; i < 10; ++i) values[rng_.below(values.size())] = 12 + rng_.normal();
    }
    values[rng_.below(values.size())] = 0.5f;  // one at least is finite
    return values;
  }
  template <size_t kCount>
  float any(const float (&values)[kCount]) {
    return values[rng_.below(kCount)];
  }
};

TEST_F(SampleVariantsTest, DrawTheReferencesToken) {
  constexpr int kRounds = testing::kIsSanitized ? 12 : 90;
  for (int round = 0; round < kRounds; ++round) {
    const int64_t vocab = round % 3 == 0 ? 129280 : round % 3 == 1 ? 512 : 1 + static_cast<int64_t>(rng_.below(3000));
    const ops::Sample::Desc desc{.vocab = vocab};
    const uint64_t kind = rng_.below(7);
    const std::vector<float> row = logits(vocab, kind);
    ops::SamplingParams params{.temperature = any({0.0f, 0.02f, 0.7f, 1.0f, 1.0f, 30.0f}),
                               .top_p = any({1.0f, 1.0f, 0.95f, 0.5f, 0.0f}),
                               .min_p = any({0.0f, 0.0f, 0.0f, 0.05f, 1.0f}),
                               .top_k = static_cast<int32_t>(any({0, 0, 0, 1, 40, 5000})),
                               .seed = rng_.next_u64()};
    std::vector<int32_t> counts, bias_ids;
    std::vector<float> bias_values;
    if (rng_.below(3) == 0) {
      params.repetition_penalty = 1.3f, params.frequency_penalty = 0.1f, params.presence_penalty = 0.2f;
      for (int64_t i = 0; i < vocab; ++i) counts.push_back(static_cast<int32_t>(rng_.below(8) == 0 ? 2 : 0));
      for (int i = 0; i < 5; ++i) {
        bias_ids.push_back(static_cast<int32_t>(rng_.below(static_cast<uint64_t>(vocab))));
        bias_values.push_back(rng_.normal());
      }
    }
    SCOPED_TRACE(::testing::Message() << vocab << " logits of kind " << kind << ", temperature " << params.temperature
                                      << ", top-p " << params.top_p << ", min-p " << params.min_p << ", top-k "
                                      << params.top_k << ", seed " << params.seed);
    for (uint64_t position = 0; position < (vocab > 10000 ? 2u : 10u); ++position) {
      const auto draw = [&](const ops::Variant<ops::Sample>& variant, int threads) {
        std::vector<float> mine = row;
        const device::Buffer workspace = testing::workspace_for(variant, desc, 1);
        device::Queue queue(threads);
        int32_t token = -1;
        const ops::SampleRow how{.params = params, .position = position};
        variant.run(desc,
                    {.logits = mine.data(),
                     .rows = &how,
                     .num_rows = 1,
                     .counts = counts.empty() ? nullptr : counts.data(),
                     .bias_ids = bias_ids.data(),
                     .bias_values = bias_values.data(),
                     .num_bias = static_cast<int64_t>(bias_ids.size()),
                     .tokens = &token,
                     .workspace = workspace.data()},
                    queue);
        return token;
      };
      const ops::Variant<ops::Sample> scalar{"scalar", nullptr, nullptr, ops::sample_reference_workspace,
                                             ops::sample_reference};
      const int32_t expected = draw(scalar, 1);
      testing::for_each_variant<ops::Sample>(desc, [&](const ops::Variant<ops::Sample>& variant, bool is_ref) {
        if (!is_ref) {
          EXPECT_EQ(draw(variant, 1 + static_cast<int>(rng_.below(3))), expected) << "position " << position;
        }
      });
    }
  }
}

// Rows of one call, drawn in another order and each in its own way, get the tokens that they get alone.
TEST_F(SampleVariantsTest, RowsOfACallAreDrawnAsAlone) {
  for (const auto& [vocab, num_rows] : {std::pair<int64_t, int64_t>{700, 45}, {5000, 7}}) {
    const ops::Sample::Desc desc{.vocab = vocab};
    std::vector<float> all;
    std::vector<ops::SampleRow> rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      const std::vector<float> row = logits(vocab, rng_.below(7));
      all.insert(all.end(), row.begin(), row.end());
      rows.push_back({.params = {.temperature = any({0.0f, 0.7f, 1.0f, 30.0f}),
                                 .top_p = any({1.0f, 0.9f}),
                                 .min_p = any({0.0f, 0.0f, 0.05f}),
                                 .top_k = static_cast<int32_t>(any({0, 0, 40})),
                                 .seed = rng_.next_u64()},
                      .position = rng_.below(1 << 20),
                      .logit_row = static_cast<int32_t>(num_rows - 1 - i)});
    }
    rows[3].logit_row = rows[4].logit_row;  // two draws from one row
    std::vector<int32_t> expected(rows.size());
    device::Queue queue(2);
    device::Buffer workspace(static_cast<size_t>(ops::sample_reference_workspace(desc, 1)));
    const std::vector<float> before = all;
    for (size_t i = 0; i < rows.size(); ++i) {
      ops::sample_reference(desc,
                            {.logits = all.data(),
                             .rows = &rows[i],
                             .num_rows = 1,
                             .tokens = &expected[i],
                             .workspace = workspace.data()},
                            queue);
    }
    testing::for_each_variant<ops::Sample>(desc, [&](const ops::Variant<ops::Sample>& variant, bool) {
      std::vector<int32_t> tokens(rows.size(), -2);
      const device::Buffer scratch = testing::workspace_for(variant, desc, num_rows);
      variant.run(desc,
                  {.logits = all.data(),
                   .rows = rows.data(),
                   .num_rows = num_rows,
                   .tokens = tokens.data(),
                   .workspace = scratch.data()},
                  queue);
      EXPECT_EQ(tokens, expected);
      EXPECT_TRUE(testing::same_bits(all, before)) << "logits are left as they are";
    });
  }
}

// On a GPU: draws from what language models give are decided without a sort of everything, for which the end of the
// workspace is, and draws from equal logits too; the first 40 of equal ones are not.
TEST_F(SampleVariantsTest, AGpuSortsEverythingOnlyWhereNothingElseDecides) {
  std::string why_not;
  if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  constexpr int64_t kVocab = 20011, kRows = 12;
  const ops::Sample::Desc desc{.vocab = kVocab};
  const auto backends = backends::all_backends();
  const auto cuda = std::find_if(backends.begin(), backends.end(),
                                 [](const ops::Backend* one) { return std::string(one->name) == "cuda"; });
  ASSERT_NE(cuda, backends.end());
  const ops::Variant<ops::Sample>& variant = (*cuda)->variants_of<ops::Sample>()[0];
  const auto place = [&](const auto& values) {
    device::Buffer buffer(values.size() * sizeof(values[0]), gpu.memory());
    gpu.memory().upload(buffer.data(), values.data(), buffer.size());
    return buffer;
  };
  struct Case {
    bool are_equal;
    std::vector<int32_t> top_k;
    bool sorts;
  };
  for (const auto& [are_equal, top_k, sorts] :
       {Case{false, {0, 0, 40, 900}, false}, Case{true, {0}, false}, Case{true, {40}, true}}) {
    std::vector<float> all;
    std::vector<ops::SampleRow> rows;
    for (int64_t i = 0; i < kRows; ++i) {
      const std::vector<float> row = logits(kVocab, are_equal ? 4 : rng_.below(3));
      all.insert(all.end(), row.begin(), row.end());
      rows.push_back({.params = {.temperature = any({0.7f, 1.0f, 1.5f}),
                                 .top_p = any({1.0f, 0.9f}),
                                 .min_p = any({0.0f, 0.0f, 0.05f}),
                                 .top_k = top_k[rng_.below(top_k.size())],
                                 .seed = rng_.next_u64()},
                      .position = rng_.below(1 << 20),
                      .logit_row = static_cast<int32_t>(i)});
    }
    std::vector<char> scratch(static_cast<size_t>(variant.workspace_bytes(desc, kRows)), 0x5a);
    const device::Buffer logits = place(all), hows = place(rows), workspace = place(scratch);
    const device::Buffer tokens(kRows * sizeof(int32_t), gpu.memory());
    variant.run(desc,
                {.logits = logits.as<float>(),
                 .rows = hows.as<ops::SampleRow>(),
                 .num_rows = kRows,
                 .tokens = tokens.as<int32_t>(),
                 .workspace = workspace.data()},
                gpu.queue());
    gpu.memory().download(scratch.data(), workspace.data(), scratch.size());
    EXPECT_EQ(std::all_of(scratch.end() - kVocab, scratch.end(), [](char c) { return c == 0x5a; }), !sorts);
  }
}

TEST_F(SampleVariantsTest, FindNothingInARowWithoutNumbers) {
  for (const int64_t vocab : {40, 4096}) {
    const ops::Sample::Desc desc{.vocab = vocab};
    testing::for_each_variant<ops::Sample>(desc, [&](const ops::Variant<ops::Sample>& variant, bool) {
      for (const float temperature : {0.0f, 1.0f}) {
        std::vector<float> row(static_cast<size_t>(vocab), std::nanf(""));
        row[7] = -kInf;
        const device::Buffer workspace = testing::workspace_for(variant, desc, 1);
        device::Queue queue(2);
        const ops::SampleRow how{.params = {.temperature = temperature}};
        int32_t token = 0;
        variant.run(
            desc, {.logits = row.data(), .rows = &how, .num_rows = 1, .tokens = &token, .workspace = workspace.data()},
            queue);
        EXPECT_EQ(token, -1);
      }
    });
  }
}

}  // namespace
}  // namespace tessera
