// SPDX-License-Identifier: Apache-2.0
// The statistics by themselves, on random data that has exactly the property they look for.
#include <gtest/gtest.h>

#include "base/rng.h"
#include "doctor/finding.h"
#include "doctor/gram.h"
#include "doctor/scale_fit.h"
#include "doctor/trial.h"
#include "numeric/nvfp4.h"
#include "testing/seed.h"

namespace tessera::doctor {

namespace {

struct Quantised {
  std::vector<uint8_t> codes, scales;
  ops::WeightView view;
};

// Normal values, rows of different size, quantised block by block.
Quantised random_nvfp4(Rng& rng, int64_t rows, int64_t cols) {
  Quantised out;
  out.codes.resize(static_cast<size_t>(rows * cols / 2)), out.scales.resize(static_cast<size_t>(rows * cols / 16));
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    const float size = 0.01f + 0.05f * rng.uniform();
    for (float& x : row) x = size * rng.normal();
    numeric::nvfp4_quantize_weight_row(row.data(), cols, 1e-4f, numeric::Nvfp4WeightRule::kAmax,
                                       out.codes.data() + r * cols / 2, out.scales.data() + r * cols / 16);
  }
  out.view = {ops::WeightFormat::kNvfp4, rows, cols, out.codes.data(), out.scales.data(), 1e-4f};
  return out;
}

TEST(ScaleFit, KnowsEveryOrder) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  const int64_t rows = 128 * static_cast<int64_t>(1 + rng.below(3)), cols = 64 * static_cast<int64_t>(2 + rng.below(4));
  Quantised made = random_nvfp4(rng, rows, cols);
  const ScaleFit sound = fit_scales(made.view);
  EXPECT_TRUE(sound.can_judge);
  EXPECT_FALSE(sound.is_wrong);
  EXPECT_LT(sound.as_stored, -0.4);
  const std::vector<uint8_t> linear = made.scales;
  for (const ScaleOrder order : {ScaleOrder::kSwizzled, ScaleOrder::kColumnLater, ScaleOrder::kColumnEarlier,
                                 ScaleOrder::kRowLater, ScaleOrder::kRowEarlier}) {
    SCOPED_TRACE(describe(order));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < cols / 16; ++g) {
        made.scales[static_cast<size_t>(scale_index(order, r, g, rows, cols / 16))] =
            linear[static_cast<size_t>(r * (cols / 16) + g)];
      }
    }
    const ScaleFit fit = fit_scales(made.view);
    EXPECT_TRUE(fit.is_wrong) << fit.as_stored << " " << fit.best_other;
    EXPECT_EQ(fit.best_order, order);
  }
}

TEST(ScaleFit, ConstantScalesProveNothing) {
  Rng rng(fresh_seed());
  Quantised made = random_nvfp4(rng, 128, 128);
  std::fill(made.scales.begin(), made.scales.end(), uint8_t{0x38});
  const ScaleFit fit = fit_scales(made.view);
  EXPECT_FALSE(fit.is_wrong);
  EXPECT_FALSE(fit.fits_no_order);
}

TEST(Gram, KinAreFoundAndStrangersAreNot) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  constexpr int64_t kWidth = 256, kFew = 12;
  std::vector<float> basis(kFew * kWidth);
  for (float& x : basis) x = rng.normal();
  // Rows that mix a few shared directions, some more than others.
  const auto relative = [&] {
    DenseMatrix matrix{80, kWidth, std::vector<float>(80 * kWidth, 0.0f)};
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t b = 0; b < kFew; ++b) {
        const float weight = rng.normal() * (b < 4 ? 2.0f : 0.5f);
        for (int64_t k = 0; k < kWidth; ++k) {
          matrix.values[static_cast<size_t>(r * kWidth + k)] += weight * basis[static_cast<size_t>(b * kWidth + k)];
        }
      }
    }
    return matrix;
  };
  DenseMatrix stranger{80, kWidth, std::vector<float>(80 * kWidth)};
  for (float& x : stranger.values) x = rng.normal();
  const std::vector<int64_t> indices = block_sample(kWidth, 128);
  ASSERT_EQ(indices.size(), 128u);
  const Gram a = reader_gram(relative(), indices), b = reader_gram(relative(), indices);
  EXPECT_GT(alignment(a, b), 0.5);
  EXPECT_LT(std::abs(alignment(a, reader_gram(stranger, indices))), 0.1);
  const Gram swapped = a.permuted(swapped_nibbles(indices.size()));
  EXPECT_LT(std::abs(alignment(swapped, b)), 0.3);
  EXPECT_NEAR(alignment(swapped.permuted(swapped_nibbles(indices.size())), b), alignment(a, b), 1e-9);
}

TEST(Trial, ComparesPairsOfTokens) {
  const Comparison better = compare({3, 2, 4, 1}, {1, 0.5, 2, 0.2});
  EXPECT_NEAR(better.gain, 1.575, 1e-12);
  EXPECT_TRUE(better.is_better());
  EXPECT_FALSE(better.is_worse());
  const Comparison noise = compare({3, 2, 4, 1}, {2, 3, 3, 2.1});
  EXPECT_FALSE(noise.is_better());
  EXPECT_FALSE(noise.is_worse());
  const double nan = std::nan("");
  EXPECT_TRUE(compare({nan, 1}, {1, 1}).is_better());
  EXPECT_TRUE(compare({1, 1}, {nan, 1}).is_worse());
  EXPECT_FALSE(compare({nan, 1}, {nan, 1}).is_better());
}

TEST(Finding, OneCauseIsToldOnce) {
  const std::vector<Finding> findings = condensed({{Severity::kNote, "a", "x", "", ""},
                                                   {Severity::kFault, "b", "layers.1.ffn.experts.2.w1", "first", ""},
                                                   {Severity::kFault, "b", "layers.3.ffn.experts.14.w1", "other", ""},
                                                   {Severity::kFault, "b", "layers.3.ffn.experts.14.w2", "", ""}});
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_EQ(findings[0].evidence, "first");
  EXPECT_EQ(findings[0].where, "layers.1.ffn.experts.2.w1 and 1 more of layers.*.ffn.experts.*.w1");
  EXPECT_EQ(findings[2].severity, Severity::kNote);
}

}  // namespace

}  // namespace tessera::doctor
