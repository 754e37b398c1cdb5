// SPDX-License-Identifier: Apache-2.0
// The vectorised rounding against the plain one of src/numeric, bit for bit, and its measurements against sums in plain
// loops.
#include "convert/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "convert/family.h"
#include "numeric/e8m0.h"
#include "testing/fills.h"
#include "testing/op_harness.h"

namespace tessera::convert {
namespace {

using numeric::Nvfp4WeightRule;

class Quantise : public testing::RandomTest {
 protected:
  // Values on and beside every rounding boundary of E2M1 for steps of all sizes, among random ones.
  std::vector<float> boundary_values(int64_t count, float step) {
    constexpr float kEdges[] = {0, 0.25f, 0.5f, 0.75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 7, 8};
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = kEdges[rng_.below(std::size(kEdges))] * step;
      const uint64_t kind = rng_.below(4);
      if (kind == 0) value = std::nextafter(value, 0.0f);
      if (kind == 1) value = std::nextafter(value, std::numeric_limits<float>::max());
      if (kind == 2) value = rng_.normal() * step;
      if (rng_.below(2) == 0) value = -value;
    }
    return values;
  }

  void check(const std::vector<float>& x, int64_t cols, Nvfp4WeightRule rule) {
    const float amax = largest_magnitude(x.data(), static_cast<int64_t>(x.size()));
    const float scale = numeric::nvfp4_weight_scale(amax, rule);
    const auto width = static_cast<size_t>(cols);
    for (size_t begin = 0; begin < x.size(); begin += width) {
      std::vector<uint8_t> codes(width / 2, 0xAA), scales(width / 16, 0xAA), expected_codes(width / 2),
          expected_scales(width / 16);
      Statistics measured;
      quantise_row(x.data() + begin, cols, scale, rule, codes.data(), scales.data(), measured);
      numeric::nvfp4_quantize_weight_row(x.data() + begin, cols, scale, rule, expected_codes.data(),
                                         expected_scales.data());
      ASSERT_EQ(codes, expected_codes);
      ASSERT_EQ(scales, expected_scales);
      check_measured(x.data() + begin, cols, scale, codes, scales, measured);
    }
  }

  void check_measured(const float* x, int64_t cols, float tensor_scale, const std::vector<uint8_t>& codes,
                      const std::vector<uint8_t>& scales, const Statistics& measured) {
    std::vector<float> after(static_cast<size_t>(cols));
    numeric::nvfp4_dequantize_row(codes.data(), scales.data(), cols, after.data());
    double value = 0, error = 0;
    int64_t zero = 0, vanished = 0, saturated = 0;
    for (int64_t b = 0; b < cols / 16; ++b) {
      const float step = numeric::kE4m3Values[scales[static_cast<size_t>(b)]] * tensor_scale;
      bool has_code = false, has_value = false, is_clipped = false;
      for (int64_t i = 16 * b; i < 16 * b + 16; ++i) {
        // code * scale is exact; one rounding with the tensor scale, as quantise_row's code * (scale * tensor scale).
        const double restored = static_cast<double>(after[static_cast<size_t>(i)]) * static_cast<double>(tensor_scale);
        const double difference = static_cast<double>(x[i]) - restored;
        value += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        error += difference * difference;
        has_code |= after[static_cast<size_t>(i)] != 0;
        has_value |= x[i] != 0;
        is_clipped |= step > 0 && std::fabs(x[i]) / step > 6;
      }
      zero += has_code ? 0 : 1;
      vanished += !has_code && has_value ? 1 : 0;
      saturated += is_clipped ? 1 : 0;
    }
    EXPECT_NEAR(measured.squared_value, value, 1e-12 * value);
    // Restored values differ by an FP32 rounding of the step and of code * step: relative, but where they are subnormal
    // at most 7 half units of 2^-149.
    const double tiny = 7 * 0x1p-150, count = static_cast<double>(cols);
    EXPECT_NEAR(measured.squared_error, error,
                0x1p-22 * std::sqrt(error * value) + 0x1p-44 * value + 2 * tiny * std::sqrt(count * error) +
                    count * tiny * tiny);
    EXPECT_EQ(measured.num_values, cols);
    EXPECT_EQ(measured.num_blocks, cols / 16);
    EXPECT_EQ(measured.num_saturated, saturated);
    if (tensor_scale > 1e-30f) {
      EXPECT_EQ(measured.num_zero, zero);
      EXPECT_EQ(measured.num_vanished, vanished);
    }
    int64_t blocks = 0;
    for (const int64_t number : measured.scales) blocks += number;
    EXPECT_EQ(blocks, cols / 16);
  }
};

TEST_F(Quantise, BitsOfThePlainRounding) {
  for (const Nvfp4WeightRule rule : {Nvfp4WeightRule::kAmax, Nvfp4WeightRule::kFourOverSix}) {
    for (const float size : {1.0f, 0.02f, 1e-20f, 1e20f, 1e-36f, 3e37f}) {
      SCOPED_TRACE(size);
      std::vector<float> x = testing::adversarial(rng_, 24, 112);
      for (float& value : x) value *= size;
      for (float& value : x) value = std::isfinite(value) ? value : 1;
      check(x, 112, rule);
      check(boundary_values(64 * 48, size), 64, rule);
    }
  }
}

TEST_F(Quantise, ValuesTooSmallForAScale) {
  std::vector<float> x(64, 1e-44f);
  const float scale = numeric::nvfp4_weight_scale(1e-44f, Nvfp4WeightRule::kAmax);
  EXPECT_EQ(scale, 1);
  check(x, 64, Nvfp4WeightRule::kAmax);
  std::fill(x.begin(), x.end(), 0.0f);
  check(x, 64, Nvfp4WeightRule::kFourOverSix);
}

TEST_F(Quantise, LargestMagnitudeSeesEveryValue) {
  for (int64_t count = 1; count < 40; ++count) {
    std::vector<float> x(static_cast<size_t>(count), -0.5f);
    const size_t at = rng_.below(static_cast<uint64_t>(count));
    x[at] = -3;
    EXPECT_EQ(largest_magnitude(x.data(), count), 3);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      x[at] = bad;
      EXPECT_TRUE(std::isinf(largest_magnitude(x.data(), count)));
    }
  }
}

// Scales that are powers of two lose nothing as UE8M0; a scale between two powers loses what rounding it up costs.
TEST_F(Quantise, WhatUe8m0WouldHaveLost) {
  std::vector<float> x(16 * 8);
  for (size_t i = 0; i < x.size(); ++i) x[i] = numeric::e2m1_to_float(static_cast<uint8_t>(rng_.below(16)));
  for (size_t b = 0; b < 8; ++b) x[16 * b] = 6;
  std::vector<uint8_t> codes(x.size() / 2), scales(x.size() / 16);
  Statistics exact, rounded;
  quantise_row(x.data(), static_cast<int64_t>(x.size()), 1.0f / 64, Nvfp4WeightRule::kAmax, codes.data(), scales.data(),
               exact);
  EXPECT_EQ(exact.squared_error, 0);
  EXPECT_EQ(exact.squared_error_e8m0, 0);
  for (float& value : x) value *= 1.25f;
  quantise_row(x.data(), static_cast<int64_t>(x.size()), 1.0f / 64, Nvfp4WeightRule::kAmax, codes.data(), scales.data(),
               rounded);
  EXPECT_EQ(rounded.squared_error, 0);
  // Steps of 2 instead of 1.25.
  double expected = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (i / 16 % 4 != 0) continue;  // every fourth block is measured
    const float value = x[i];
    const double difference = value - 2 * numeric::e2m1_to_float(numeric::e2m1_from_float(value / 2));
    expected += difference * difference;
  }
  EXPECT_GT(expected, 0);
  EXPECT_NEAR(rounded.squared_error_e8m0, expected, 1e-9 * expected);
  Statistics again;
  measure_row(codes.data(), scales.data(), static_cast<int64_t>(x.size()), 1.0f / 64, true, again);
  EXPECT_NEAR(again.squared_error_e8m0, expected, 1e-9 * expected);
  EXPECT_EQ(again.scales, rounded.scales);
}

TEST(Family, OfNames) {
  EXPECT_EQ(family_of("layers.0.ffn.experts.17.w3"), Family::kExperts);
  EXPECT_EQ(family_of("mtp.0.ffn.shared_experts.w1"), Family::kShared);
  EXPECT_EQ(family_of("layers.12.attn.wo_a"), Family::kAttention);
  EXPECT_EQ(family_of("layers.2.attn.compressor.wgate"), Family::kCompressor);
  EXPECT_EQ(family_of("layers.2.attn.indexer.compressor.wkv"), Family::kCompressor);
  EXPECT_EQ(family_of("layers.2.attn.indexer.wq_b"), Family::kIndexer);
  EXPECT_EQ(family_of("head"), Family::kHead);
  for (const char* none :
       {"embed", "layers.0.ffn.gate", "layers.2.attn.indexer.weights_proj", "mtp.0.e_proj", "",
        "layers.0.attn.wq_a.weight", "layers..attn.wq_a", "layers.0.hc_attn_fn", "xlayers.0.attn.wkv",
        "mtp.2.markov_head.markov_w1", "layers.0.ffn.experts.w1", "layers.0.attn.compressor.ape"}) {
    EXPECT_EQ(family_of(none), std::nullopt) << none;
  }
}

TEST(Family, Lists) {
  EXPECT_EQ(to_string(parse_families("head,experts")), "experts,head");
  EXPECT_TRUE(parse_families("all").all());
  for (const char* bad : {"", "experts,", "expert", "experts,,head", "Experts"}) {
    EXPECT_THROW(parse_families(bad), Error) << bad;
  }
}

}  // namespace
}  // namespace tessera::convert
