// SPDX-License-Identifier: Apache-2.0
// FP8 and BF16 weights packed for a GPU's tensor cores give the same bits as in the checkpoint's layout (cuda.packed
// and cuda.mma), for one and for many tokens, with codes of every kind; NVFP4's give the same NaNs. FP8 whose scales
// fold has the bits of BF16 weights of the same values instead.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <map>

#include "numeric/bf16.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::WeightFormat;

class PackedVariantsTest : public testing::RandomTest {
 protected:
  // calls(variant) for cuda.packed and cuda.mma; false: there is no GPU.
  template <class Op, class Call>
  bool with_both(const typename Op::Desc& desc, const Call& call) {
    int num_called = 0;
    testing::for_each_variant<Op>(desc, [&](const ops::Variant<Op>& variant, bool) {
      const std::string name = variant.name;
      if (!testing::is_on_gpu(variant) || (name != "packed" && name != "mma")) return;
      ++num_called;
      call(variant);
    });
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) return false;
    EXPECT_EQ(num_called, 2);
    return true;
  }

  void check(WeightFormat format, int64_t in, int64_t out, int64_t groups, int64_t tokens,
             const std::function<void(testing::RandomWeight&)>& edit = nullptr);
  testing::RandomWeight as_bf16(const testing::RandomWeight& fp8);
};

// Without `edit` outputs are finite, and the two are held against the reference too.
void PackedVariantsTest::check(WeightFormat format, int64_t in, int64_t out, int64_t groups, int64_t tokens,
                               const std::function<void(testing::RandomWeight&)>& edit) {
  const ops::Linear::Desc desc{.in = in, .out = out, .groups = groups, .format = format, .output = DType::kF32};
  SCOPED_TRACE(desc.to_string() + ", " + std::to_string(tokens) + " tokens");
  testing::RandomWeight weight = testing::random_weight(rng_, format, groups * out, in);
  if (format == WeightFormat::kFp8Block) testing::set_fp8_scales(weight, rng_, false);
  if (edit) edit(weight);
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, tokens, groups * in), DType::kBF16, {tokens, groups * in});
  std::vector<std::vector<float>> results;
  const bool has_gpu = with_both<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant) {
    const testing::VariantWeight given = testing::weight_for(variant, desc, weight.view);
    results.push_back(testing::run_linear(variant, desc, x, given.view, 0, tokens, 1));
  });
  if (!has_gpu) return;
  ASSERT_EQ(results.size(), 2u);
  const std::vector<float> expected = testing::run_linear(testing::kScalarLinear, desc, x, weight.view, 0, tokens, 1);
  int64_t num_nans = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::isnan(results[0][i]), std::isnan(expected[i])) << i;
    ASSERT_EQ(std::isnan(results[1][i]), std::isnan(expected[i])) << i;
    if (std::isnan(expected[i])) {
      ++num_nans;
    } else if (format != WeightFormat::kNvfp4) {  // packed NVFP4's products take other columns together
      ASSERT_EQ(std::bit_cast<uint32_t>(results[0][i]), std::bit_cast<uint32_t>(results[1][i])) << i;
    }
  }
  if (!edit) {
    EXPECT_TRUE(testing::is_close(results[0], expected, testing::kF32Bound));
  } else if (format != WeightFormat::kBf16) {
    EXPECT_GT(num_nans, 0);
    EXPECT_LT(num_nans, static_cast<int64_t>(expected.size()));
  }
}

TEST_F(PackedVariantsTest, LinearHasTheBitsOfTheCheckpointsLayout) {
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    // One unit or less; a ragged chunk; several chunks, the last one unit long; two rounds of a block's warps.
    for (const int64_t in : {128, 256, 384, 640, 1280, 4608}) {
      for (const int64_t tokens : {1, 3, 8}) check(format, in, 1 + static_cast<int64_t>(rng_.below(50)), 1, tokens);
    }
    for (const int64_t tokens : {9, 17, 40}) check(format, 384, 33, 1, tokens);
    check(format, 896, 150, 1, 2);  // more than one row of FP8 blocks
    check(format, 896, 150, 1, 11);
    for (const int64_t tokens : {4, 12}) check(format, 640, 48, 3, tokens);  // groups begin inside a row of FP8 blocks
  }
}

// Of FP8 whose scales fold: the same values.
testing::RandomWeight PackedVariantsTest::as_bf16(const testing::RandomWeight& fp8) {
  testing::RandomWeight bf16 = testing::random_weight(rng_, WeightFormat::kBf16, fp8.view.rows, fp8.view.cols);
  const std::vector<double> values = fp8.values();
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t& value = bf16.data.as<uint16_t>()[i];
    value = numeric::bf16_from_float(static_cast<float>(values[i]));
    EXPECT_EQ(static_cast<double>(numeric::bf16_to_float(value)), values[i]);
  }
  return bf16;
}

// Their products are exact in BF16 and their sums those of BF16: by every kernel for packed weights.
TEST_F(PackedVariantsTest, ScalesThatFoldHaveTheBitsOfBf16) {
  const auto run = [&](const testing::RandomWeight& weight, ops::Linear::Desc desc, const device::Tensor& x,
                       int64_t tokens) {
    desc.format = weight.view.format;
    std::map<std::string, std::vector<float>> results;
    testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
      if (!testing::is_on_gpu(variant) || std::string(variant.name) == "mma") return;
      const testing::VariantWeight given = testing::weight_for(variant, desc, weight.view);
      if (given.view.data == weight.view.data) return;  // not packed
      EXPECT_EQ(given.view.scales_fold, desc.format == WeightFormat::kFp8Block);
      results[variant.name] = testing::run_linear(variant, desc, x, given.view, 0, tokens, 1);
    });
    return results;
  };
  struct Case {
    int64_t in, out, groups, tokens;
  };
  for (const Case& c : {Case{128, 33, 1, 1},
                        {384, 40, 1, 3},
                        {640, 48, 3, 8},
                        {1280, 150, 1, 2},
                        {4608, 17, 1, 5},
                        {640, 800, 1, 130},  // so many that they do not stream, and a unit that is half there
                        {512, 16, 1, 40},
                        {1024, 144, 2, 70},
                        {512, 272, 1, 130}}) {
    const ops::Linear::Desc desc{.in = c.in, .out = c.out, .groups = c.groups, .output = DType::kF32};
    testing::RandomWeight fp8 = testing::random_weight(rng_, WeightFormat::kFp8Block, c.groups * c.out, c.in);
    testing::set_fp8_scales(fp8, rng_, true);
    const testing::RandomWeight bf16 = as_bf16(fp8);
    const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, c.tokens, c.groups * c.in), DType::kBF16,
                                                {c.tokens, c.groups * c.in});
    const auto found = run(fp8, desc, x, c.tokens), expected = run(bf16, desc, x, c.tokens);
    SCOPED_TRACE(desc.to_string() + ", " + std::to_string(c.tokens) + " tokens");
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, result] : found) {
      EXPECT_TRUE(testing::same_bits_or_nan(result, expected.at(name))) << name;
    }
  }
}

// All 256 codes, among them NaN of either sign, in few rows: these are NaN, the others what they are without.
TEST_F(PackedVariantsTest, EveryE4m3CodeCounts) {
  for (const int64_t tokens : {1, 8, 20}) {
    check(WeightFormat::kFp8Block, 640, 41, 1, tokens, [&](testing::RandomWeight& weight) {
      uint8_t* codes = weight.data.as<uint8_t>();
      const int64_t all = static_cast<int64_t>(rng_.below(41)), one = static_cast<int64_t>(rng_.below(41));
      for (int64_t k = 0; k < 640; ++k) codes[all * 640 + k] = static_cast<uint8_t>(k);
      codes[one * 640 + static_cast<int64_t>(rng_.below(640))] = rng_.below(2) == 0 ? 0x7F : 0xFF;
    });
  }
}

// One NaN is found in any row, in any half of any word of a piece; rows without one have none.
TEST_F(PackedVariantsTest, ANanIsFoundAnywhere) {
  constexpr int64_t kIn = 256, kOut = 16;
  const ops::Linear::Desc desc{.in = kIn, .out = kOut, .format = WeightFormat::kFp8Block, .output = DType::kF32};
  const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, 1, kIn), DType::kBF16, {1, kIn});
  const testing::RandomWeight weight = testing::random_weight(rng_, WeightFormat::kFp8Block, kOut, kIn);
  for (int64_t run = 0; run < kIn / kOut; ++run) {
    // Every other row has one; over the runs, in each of 16 neighbouring columns.
    testing::RandomWeight with = {weight.data.clone_into(device::host_memory()),
                                  weight.scales.clone_into(device::host_memory()), weight.view};
    with.view.data = with.data.data(), with.view.block_scales = with.scales.data();
    for (int64_t r = run % 2; r < kOut; r += 2) {
      with.data.as<uint8_t>()[r * kIn + run * kOut + (r + run / 2) % kOut] = rng_.below(2) == 0 ? 0x7F : 0xFF;
    }
    with_both<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant) {
      const testing::VariantWeight given = testing::weight_for(variant, desc, with.view);
      const std::vector<float> y = testing::run_linear(variant, desc, x, given.view, 0, 1, 1);
      for (int64_t r = 0; r < kOut; ++r) {
        EXPECT_EQ(std::isnan(y[static_cast<size_t>(r)]), r % 2 == run % 2) << "row " << r << ", run " << run;
      }
    });
  }
}

// NVFP4's NaN scales make their rows NaN, as the reference has it, and no others.
TEST_F(PackedVariantsTest, NanScalesOfAnyBlock) {
  constexpr int64_t kOut = 41;
  for (const int64_t in : {128, 640, 1024}) {
    for (const int64_t tokens : {1, 8, 20}) {
      check(WeightFormat::kNvfp4, in, kOut, 1, tokens, [&](testing::RandomWeight& weight) {
        const uint64_t blocks = static_cast<uint64_t>(in / 16);
        for (int i = 0; i < 6; ++i) {
          const uint64_t row = rng_.below(static_cast<uint64_t>(kOut));
          weight.scales.as<uint8_t>()[row * blocks + rng_.below(blocks)] = i % 2 == 0 ? 0x7F : 0xFF;
        }
      });
    }
  }
}

TEST_F(PackedVariantsTest, ExpertsHaveTheBitsOfTheCheckpointsLayout) {
  constexpr int64_t kExperts = 3, kTopK = 2, kTokens = 10;
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const auto& [hidden, inner] : {std::pair<int64_t, int64_t>{640, 128}, {256, 384}}) {
      const ops::MoeExperts::Desc desc{.hidden = hidden,
                                       .inner = inner,
                                       .num_local = kExperts,
                                       .top_k = kTopK,
                                       .format = format,
                                       .swiglu_limit = 10};
      SCOPED_TRACE(desc.to_string());
      std::vector<testing::RandomWeight> weights;
      for (int64_t i = 0; i < 3 * kExperts; ++i) {
        weights.push_back(
            testing::random_weight(rng_, format, i % 3 == 2 ? hidden : inner, i % 3 == 2 ? inner : hidden));
        if (format == WeightFormat::kFp8Block) testing::set_fp8_scales(weights.back(), rng_, false);
      }
      const device::Tensor x =
          testing::as_tensor(testing::adversarial(rng_, kTokens, hidden), DType::kBF16, {kTokens, hidden});
      std::vector<int32_t> ids;
      std::vector<float> routing;
      for (int64_t t = 0; t < kTokens; ++t) {
        const int32_t left_out = static_cast<int32_t>(rng_.below(kExperts));
        for (int32_t e = 0; e < kExperts; ++e) {
          if (e != left_out) ids.push_back(e), routing.push_back(rng_.uniform());
        }
      }
      std::vector<std::vector<float>> results;
      const bool has_gpu = with_both<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant) {
        std::vector<testing::VariantWeight> given;
        std::vector<ops::WeightView> views[3];
        for (size_t i = 0; i < weights.size(); ++i) {
          given.push_back(testing::weight_for(variant, desc, weights[i].view));
          views[i % 3].push_back(given.back().view);
        }
        results.push_back(testing::run_experts(variant, desc, {x, ids, routing}, views, 0, kTokens, 1));
      });
      if (!has_gpu) return;
      ASSERT_EQ(results.size(), 2u);
      EXPECT_TRUE(testing::same_bits(results[0], results[1]));
    }
  }
}

TEST_F(PackedVariantsTest, ExpertsWhoseScalesFoldHaveTheBitsOfBf16) {
  constexpr int64_t kHidden = 640, kInner = 128, kTokens = 9;
  ops::MoeExperts::Desc desc{
      .hidden = kHidden, .inner = kInner, .num_local = 2, .top_k = 1, .format = WeightFormat::kFp8Block};
  std::vector<testing::RandomWeight> weights[2];  // FP8, BF16
  for (int64_t i = 0; i < 3 * desc.num_local; ++i) {
    weights[0].push_back(testing::random_weight(rng_, WeightFormat::kFp8Block, i % 3 == 2 ? kHidden : kInner,
                                                i % 3 == 2 ? kInner : kHidden));
    testing::set_fp8_scales(weights[0].back(), rng_, true);
    weights[1].push_back(as_bf16(weights[0].back()));
  }
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, kTokens, kHidden), DType::kBF16, {kTokens, kHidden});
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < kTokens; ++t) {
    ids.push_back(static_cast<int32_t>(rng_.below(2))), routing.push_back(rng_.uniform());
  }
  std::vector<std::vector<float>> results;
  for (const auto& format : weights) {
    desc.format = format.front().view.format;
    testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
      if (!testing::is_on_gpu(variant) || std::string(variant.name) != "packed") return;
      std::vector<testing::VariantWeight> given;
      std::vector<ops::WeightView> views[3];
      for (size_t i = 0; i < format.size(); ++i) {
        given.push_back(testing::weight_for(variant, desc, format[i].view));
        EXPECT_EQ(given.back().view.scales_fold, desc.format == WeightFormat::kFp8Block);
        views[i % 3].push_back(given.back().view);
      }
      results.push_back(testing::run_experts(variant, desc, {x, ids, routing}, views, 0, kTokens, 1));
    });
  }
  if (results.empty()) return;  // no GPU
  ASSERT_EQ(results.size(), 2u);
  EXPECT_TRUE(testing::same_bits_or_nan(results[0], results[1]));
}

}  // namespace
}  // namespace tessera
