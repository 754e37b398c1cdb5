// SPDX-License-Identifier: Apache-2.0
// The tile kernels on emulated tiles, against the reference op and row by row.
#include "backends/amx_emulation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "backends/cpu_common/attention.h"
#include "backends/cpu_common/index_scores.h"
#include "backends/emulated_variants.h"
#include "backends/ring_attention.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using backends::cpu_common::PanelJob;
using ops::WeightFormat;

using testing::kEmulatedLinear, testing::kEmulatedMoe;

constexpr ops::Variant<ops::Attention> kAttention =
    backends::cpu_common::attention_variant<backends::amx_emulated::attention>("emulated");
constexpr ops::Variant<ops::IndexScores> kIndexScores =
    backends::cpu_common::index_scores_variant<backends::amx_emulated::index_scores>("emulated");

class AmxEmulationTest : public testing::RandomTest {};

// sums of `count` rows of x from `first`, [count][rows of the weight].
std::vector<float> sums_of(const ops::WeightView& packed, const device::Tensor& x, int64_t first, int64_t count) {
  namespace common = backends::cpu_common;
  const common::PanelKernel kernel = packed.format == WeightFormat::kNvfp4      ? backends::amx_emulated::nvfp4
                                     : packed.format == WeightFormat::kFp8Block ? backends::amx_emulated::fp8
                                                                                : backends::amx_emulated::bf16;
  const device::Buffer sums(sizeof(float) * common::kJobPanels * common::kSumRows * common::kPanelRows);
  std::vector<float> out(static_cast<size_t>(count * packed.rows));
  const int64_t all = common::num_panels(packed.rows);
  for (int64_t begin = 0; begin < all; begin += common::kJobPanels) {
    PanelJob job{};
    job.num_panels = std::min(common::kJobPanels, all - begin);
    for (int64_t p = 0; p < job.num_panels; ++p) job.panels[p] = common::panel_of(packed, begin + p);
    job.cols = packed.cols;
    job.rows = x.as<uint16_t>() + first * packed.cols;
    job.row_stride = packed.cols * 2;
    job.num_rows = count;
    job.sums = sums.as<float>();
    kernel(job);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t n = 0; n < job.num_panels * 16 && begin * 16 + n < packed.rows; ++n) {
        out[static_cast<size_t>(t * packed.rows + begin * 16 + n)] =
            job.sums[(n / 16 * common::kSumRows + t) * common::kPanelRows + n % 16] *
            common::format_factor(packed.format) * packed.tensor_scale;
      }
    }
  }
  return out;
}

TEST_F(AmxEmulationTest, EqualsTheReferenceAtEveryNumberOfRows) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  for (const auto format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 50}) {
      const int64_t in = 32 * (1 + static_cast<int64_t>(rng_.below(36))),
                    out = 1 + static_cast<int64_t>(rng_.below(90));
      SCOPED_TRACE(std::string(ops::to_string(format)) + " " + std::to_string(out) + " x " + std::to_string(in) + ", " +
                   std::to_string(count) + " rows");
      const testing::RandomWeight weight = testing::random_weight(rng_, format, out, in);
      const ops::Linear::Desc desc{.in = in, .out = out, .format = format, .output = DType::kF32};
      const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, count, in), DType::kBF16, {count, in});
      testing::PoisonedTensor expected(DType::kF32, {count, out});
      const device::Buffer workspace(static_cast<size_t>(ops::linear_reference_workspace(desc, count)));
      device::Queue queue(1);
      ops::linear_reference(
          desc,
          {.x = x, .weight = weight.view, .y = expected.view(), .num_tokens = count, .workspace = workspace.data()},
          queue);
      const testing::VariantWeight packed = testing::weight_for(kEmulatedLinear, desc, weight.view);
      const std::vector<float> found = sums_of(packed.view, x, 0, count);
      EXPECT_TRUE(testing::is_close(found, expected.floats(), testing::kF32Bound));
      const int64_t t = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count)));
      EXPECT_TRUE(testing::same_bits(sums_of(packed.view, x, t, 1),
                                     std::span(found).subspan(static_cast<size_t>(t * out), static_cast<size_t>(out))))
          << "row " << t << " alone";
    }
  }
}

// BF16 bits that arithmetic treats specially. Rows differ in what they hold, so that not all sums are NaN.
uint16_t special_bits(Rng& rng, uint64_t kind) {
  const uint16_t sign = rng.below(2) == 0 ? 0 : 0x8000;
  const uint64_t pick = rng.below(40);
  if (pick < 3) return sign;
  if (kind == 0 || pick < 8) return static_cast<uint16_t>(sign | rng.below(0x80));  // denormals
  if (kind == 1) return static_cast<uint16_t>(sign | (0x80 + rng.below(0x500)));    // products are or become denormal
  if (kind == 2 && pick == 8 && rng.below(20) == 0) return static_cast<uint16_t>(sign | 0x7F80);  // infinite
  if (kind == 3 && pick == 8 && rng.below(20) == 0) return static_cast<uint16_t>(sign | 0x7FC1);
  if (kind == 4) return static_cast<uint16_t>(sign | (0x7E00 + rng.below(0x180)));  // sums overflow
  return static_cast<uint16_t>(sign | (0x3E00 + rng.below(0x200)));
}

TEST_F(AmxEmulationTest, FewRowsAreTheSameBitsAsTiles) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  constexpr int64_t kMost = 64;
  for (const auto format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const int64_t in : {32, 96, 1024 + 160, 4096 + 32}) {
      const int64_t out = 1 + static_cast<int64_t>(rng_.below(100));
      testing::RandomWeight weight = testing::random_weight(rng_, format, out, in);
      const ops::Linear::Desc desc{.in = in, .out = out, .format = format};
      const testing::VariantWeight packed = testing::weight_for(kEmulatedLinear, desc, weight.view);
      if (format == WeightFormat::kBf16) {
        uint16_t* words = const_cast<uint16_t*>(static_cast<const uint16_t*>(packed.view.data));
        for (int64_t i = 0; i < out * in; ++i) {
          if (rng_.below(8) == 0) words[i] = static_cast<uint16_t>(words[i] & 0x807F);
        }
      }
      device::Tensor x(DType::kBF16, {kMost, in});
      for (int64_t t = 0; t < kMost; ++t) {
        const uint64_t kind = rng_.below(7);
        for (int64_t k = 0; k < in; ++k) x.as<uint16_t>()[t * in + k] = special_bits(rng_, kind);
      }
      const std::vector<float> all = sums_of(packed.view, x, 0, kMost);
      for (const int64_t count : {1, 1, 2, 2, 3, 3, 4, 4, 5, 16, 17}) {
        const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(kMost - count + 1)));
        const std::vector<float> found = sums_of(packed.view, x, first, count);
        for (size_t i = 0; i < found.size(); ++i) {
          const float expected = all[static_cast<size_t>(first * out) + i];
          if (std::isnan(expected) && std::isnan(found[i])) continue;
          ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(found[i]))
              << ops::to_string(format) << " [" << out << ", " << in << "], " << count << " rows from " << first
              << ", at " << i << ": " << found[i] << ", tiles " << expected;
        }
      }
    }
  }
}

TEST_F(AmxEmulationTest, TiledRowsOfManyTokensGiveTheBitsOfFew) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  constexpr int64_t kMost = 107, kIn = 512, kOut = 144;
  for (const int64_t groups : {1, 3}) {
    for (const auto& [format, mode] :
         {std::pair{WeightFormat::kNvfp4, ops::InputMode::kA16}, std::pair{WeightFormat::kNvfp4, ops::InputMode::kA8},
          std::pair{WeightFormat::kFp8Block, ops::InputMode::kA16}}) {
      const ops::Linear::Desc desc{
          .in = kIn, .out = kOut, .groups = groups, .format = format, .input = mode, .output = DType::kF32};
      const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, groups * kOut, kIn);
      const testing::VariantWeight packed = testing::weight_for(kEmulatedLinear, desc, weight.view);
      const device::Tensor x =
          testing::as_tensor(testing::adversarial(rng_, kMost, groups * kIn), DType::kBF16, {kMost, groups * kIn});
      const std::vector<float> all = testing::run_linear(kEmulatedLinear, desc, x, packed.view, 0, kMost, 1);
      EXPECT_TRUE(testing::is_close(all, testing::run_linear(testing::kScalarLinear, desc, x, weight.view, 0, kMost, 1),
                                    testing::kF32Bound));
      for (const int64_t count : {1, 3, 4, 31, 32, 49, 65}) {
        const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(kMost - count + 1)));
        const int64_t width = groups * kOut;
        EXPECT_TRUE(testing::same_bits(
            testing::run_linear(kEmulatedLinear, desc, x, packed.view, first, count, 1),
            std::span(all).subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width))))
            << count << " rows from " << first;
      }
    }
  }
}

TEST_F(AmxEmulationTest, ExpertsWithTiledRowsGiveTheBitsOfOneToken) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  constexpr int64_t kTokens = 120, kWidth = 512, kExperts = 5;
  for (const auto mode : {ops::InputMode::kA16, ops::InputMode::kA8}) {
    const ops::MoeExperts::Desc desc{.hidden = kWidth,
                                     .inner = kWidth,
                                     .num_local = kExperts,
                                     .top_k = 1,
                                     .format = WeightFormat::kNvfp4,
                                     .input = mode,
                                     .swiglu_limit = 10};
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < 3 * kExperts; ++i) {
      const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, kWidth, kWidth);
      packed.push_back(testing::weight_for(kEmulatedMoe, desc, weight.view));
      views[i % 3].push_back(packed.back().view);
    }
    const device::Tensor x =
        testing::as_tensor(testing::adversarial(rng_, kTokens, kWidth), DType::kBF16, {kTokens, kWidth});
    std::vector<int32_t> ids;
    std::vector<float> routing;
    for (int64_t t = 0; t < kTokens; ++t) {
      const uint64_t pick = rng_.below(20);
      ids.push_back(t % 50 == 7 ? 3 : pick < 1 ? 0 : pick < 3 ? 4 : pick < 7 ? 2 : 1);
      routing.push_back(rng_.uniform());
    }
    const auto run = [&](int64_t first, int64_t count) {
      return testing::run_experts(kEmulatedMoe, desc, {x, ids, routing}, views, first, count, 1);
    };
    const std::vector<float> all = run(0, kTokens);
    for (const int64_t count : {1, 2, 31, 33}) {
      const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(kTokens - count + 1)));
      EXPECT_TRUE(testing::same_bits(run(first, count), std::span(all).subspan(static_cast<size_t>(first * kWidth),
                                                                               static_cast<size_t>(count * kWidth))))
          << count << " tokens from " << first;
    }
  }
}

TEST_F(AmxEmulationTest, AttentionOfATokenAloneAndInABatch) {
  if (!device::probe_machine().cpu.avx512_bf16) GTEST_SKIP() << "needs AVX-512 with VBMI and BF16";
  constexpr int64_t kEntries = 301, kSlots = 140;
  const std::pair<int64_t, int64_t> shapes[] = {{512, 37}, {128, 70}, {192, 16}};
  for (const auto& [width, heads] : shapes) {
    SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(width));
    const ops::Attention::Desc desc{.heads = heads,
                                    .head_dim = width,
                                    .window = 128,
                                    .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width))),
                                    .layout = {ops::EntryFormat::kKvFp8Bf16, width, 64}};
    const testing::RingAttention attention(rng_, desc, kSlots, {0, 5, 30, 31, 32, 126, 127, 1001, 1002},
                                           {0, 1, 31, 32, 33, 128, 129, kEntries, 255});
    const int64_t tokens = attention.num_tokens();
    const std::vector<float> all = attention.run(kAttention, 0, tokens, 1);
    EXPECT_TRUE(testing::is_close(all, attention.reference(), testing::kBf16Bound));
    for (int64_t t = 0; t < tokens; ++t) {
      attention.expect_rows(kAttention, all, t, 1, static_cast<int>(t % 2 == 0 ? 2 : 4 + t));
    }
    attention.expect_rows(kAttention, all, 1, 8, 9);  // more parts than are computed at a time
    attention.expect_rows(kAttention, all, 0, tokens, 3);
  }
}

TEST_F(AmxEmulationTest, IndexScoresOfATokenAloneAndInABatch) {
  if (!device::probe_machine().cpu.avx512_bf16) GTEST_SKIP() << "needs AVX-512 with VBMI and BF16";
  constexpr int64_t kTokens = 18, kKeys = 203;
  for (const auto format : {ops::EntryFormat::kIndexFp4, ops::EntryFormat::kBf16}) {
    for (const int64_t heads : {64, 37, 5}) {
      const int64_t width = heads == 37 ? 96 : 128;
      SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(width));
      const ops::IndexScores::Desc desc{.heads = heads, .width = width, .keys = {format, width, 0}};
      const int64_t bytes = desc.keys.entry_bytes();
      const std::vector<float> values = testing::adversarial(rng_, kKeys, width);
      std::vector<uint8_t> keys(static_cast<size_t>(kKeys * bytes));
      for (int64_t j = 0; j < kKeys; ++j)
        ops::encode_entry(desc.keys, values.data() + j * width, keys.data() + j * bytes);
      const device::Tensor queries = testing::as_tensor(testing::adversarial(rng_, kTokens * heads, width),
                                                        DType::kBF16, {kTokens, heads * width});
      const device::Tensor weights =
          testing::as_tensor(testing::adversarial(rng_, kTokens, heads), DType::kBF16, {kTokens, heads});
      std::vector<int32_t> counts;
      for (int64_t t = 0; t < kTokens; ++t) counts.push_back(static_cast<int32_t>(rng_.below(kKeys + 1)));
      const auto run = [&](const ops::Variant<ops::IndexScores>& variant, int64_t first, int64_t count, int threads) {
        device::Queue queue(threads);
        std::vector<float> scores(static_cast<size_t>(count * kKeys), -7);
        variant.run(desc,
                    {.queries = {queries.as<uint16_t>() + first * heads * width, DType::kBF16, {count, heads * width}},
                     .weights = {weights.as<uint16_t>() + first * heads, DType::kBF16, {count, heads}},
                     .keys = keys.data(),
                     .counts = counts.data() + first,
                     .stride = kKeys,
                     .scores = scores.data(),
                     .num_tokens = count},
                    queue);
        for (int64_t t = 0; t < count; ++t) {
          for (int64_t j = counts[static_cast<size_t>(first + t)]; j < kKeys; ++j)
            scores[static_cast<size_t>(t * kKeys + j)] = 0;  // beyond what the token sees nothing is said
        }
        return scores;
      };
      const ops::Variant<ops::IndexScores> scalar{"scalar", nullptr, nullptr, nullptr, ops::index_scores_reference};
      const std::vector<float> all = run(kIndexScores, 0, kTokens, 2);
      EXPECT_TRUE(testing::is_close(all, run(scalar, 0, kTokens, 2), testing::kF32Bound));
      for (int64_t t = 0; t < kTokens; ++t) {
        EXPECT_TRUE(
            testing::same_bits(run(kIndexScores, t, 1, 1),
                               std::span(all).subspan(static_cast<size_t>(t * kKeys), static_cast<size_t>(kKeys))))
            << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
