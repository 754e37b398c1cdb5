// SPDX-License-Identifier: Apache-2.0
// NVFP4, Q8, Q4 and FP8 blocks against the rules written out in double, and published examples.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <vector>

#include "base/json.h"
#include "base/rng.h"
#include "numeric/bf16.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4.h"
#include "numeric/nvfp4.h"
#include "tensor/scale_layout.h"
#include "testing/goldens.h"
#include "testing/seed.h"

namespace tessera::numeric {
namespace {

class Blocks : public ::testing::Test {
 protected:
  Blocks() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  // Heavy tails, zeros, denormals, single non-zeros.
  std::vector<float> row(int64_t count) {
    std::vector<float> x(static_cast<size_t>(count));
    const uint64_t kind = rng_.below(6);
    const float scale = std::ldexp(1.0f, static_cast<int>(rng_.below(60)) - 30);
    for (float& value : x) {
      value = rng_.normal() * scale;
      if (rng_.below(20) == 0) value *= 50;
      if (rng_.below(10) == 0) value = rng_.below(2) == 0 ? 0.0f : -0.0f;
      if (kind == 1) value = std::ldexp(rng_.normal(), -140);
      if (kind == 2) value = 0;
    }
    if (kind == 3) std::fill(x.begin(), x.end(), x[0]);
    if (kind == 4) {
      std::fill(x.begin(), x.end(), 0.0f);
      x[rng_.below(static_cast<uint64_t>(count))] = scale;
    }
    return x;
  }

  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
};

TEST_F(Blocks, Nvfp4ActivationsFollowTheRule) {
  for (int round = 0; round < 300; ++round) {
    const int64_t count = 16 * (1 + static_cast<int64_t>(rng_.below(20)));
    const std::vector<float> x = row(count);
    float amax = 0;
    for (const float value : x) amax = std::max(amax, std::fabs(value));
    const float g = nvfp4_activation_scale(amax);
    EXPECT_EQ(g, amax == 0 ? 1.0f : amax / 2688.0f);
    std::vector<uint8_t> codes(static_cast<size_t>(count / 2)), scales(static_cast<size_t>(count / 16));
    std::vector<float> back(static_cast<size_t>(count));
    nvfp4_quantize_row(x.data(), count, g, codes.data(), scales.data());
    nvfp4_dequantize_row(codes.data(), scales.data(), count, back.data());
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i);
      float block_max = 0;
      for (int64_t j = i / 16 * 16; j < i / 16 * 16 + 16; ++j)
        block_max = std::max(block_max, std::fabs(x[static_cast<size_t>(j)]));
      const uint8_t scale = scales[at / 16], code = static_cast<uint8_t>(codes[at / 2] >> (4 * (i % 2)) & 15);
      if (g > 0) {
        EXPECT_EQ(scale, e4m3_from_float(block_max / (6 * g)));
      }
      const float step = e4m3_to_float(scale) * g;
      EXPECT_EQ(code, step == 0 ? 0 : e2m1_from_float(x[at] / step));
      EXPECT_EQ(back[at], e2m1_to_float(code) * e4m3_to_float(scale));
      EXPECT_EQ(bf16_round(back[at]), back[at]) << "exact in BF16";
    }
  }
}

TEST_F(Blocks, AnythingNotFiniteStaysVisible) {
  for (const float bad :
       {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(32, 1.0f), back(32);
    x[17] = bad;
    uint8_t codes[16], scales[2], q8_codes[32], q8_scales[2], q4_scales[1];
    nvfp4_quantize_row(x.data(), 32, 1 / 448.0f, codes, scales);
    nvfp4_dequantize_row(codes, scales, 32, back.data());
    EXPECT_TRUE(std::isnan(back[16]) && std::isnan(back[31]));
    EXPECT_EQ(back[15], 432) << "the other block: scale E4M3(448 / 6) = 72, code 6";
    q8_quantize(x.data(), 32, 16, q8_codes, q8_scales);
    q8_dequantize(q8_codes, q8_scales, 32, 16, back.data());
    EXPECT_TRUE(std::isnan(back[17]));
    EXPECT_EQ(back[0], 1);
    q4_quantize(x.data(), 32, codes, q4_scales);
    q4_dequantize(codes, q4_scales, 32, back.data());
    EXPECT_TRUE(std::isnan(back[17]));
    // A tensor scale that is not finite poisons every block.
    x[17] = 1;
    nvfp4_quantize_row(x.data(), 32, bad, codes, scales);
    EXPECT_EQ(scales[0], kE4m3Nan);
  }
}

TEST_F(Blocks, BoundedScaleIsAnUpperBound) {
  EXPECT_EQ(nvfp4_bounded_activation_scale(0.5f, 10), 0.5f * 100 / 2688);
  std::vector<float> zeros(16);
  uint8_t codes[8], scales[1];
  nvfp4_quantize_row(zeros.data(), 16, nvfp4_bounded_activation_scale(0, 10), codes, scales);
  EXPECT_EQ(scales[0], 0) << "routing weight 0: a row of zeros";
}

TEST_F(Blocks, WeightRules) {
  for (int round = 0; round < 200; ++round) {
    const std::vector<float> x = row(64);
    float amax = 0;
    for (const float value : x) amax = std::max(amax, std::fabs(value));
    const auto error = [&](Nvfp4WeightRule rule, float scale) {
      uint8_t codes[32], scales[4];
      float back[64];
      nvfp4_quantize_weight_row(x.data(), 64, scale, rule, codes, scales);
      nvfp4_dequantize_row(codes, scales, 64, back);
      double sum = 0;
      for (size_t i = 0; i < 64; ++i)
        sum += std::pow(static_cast<double>(x[i]) - static_cast<double>(back[i]) * static_cast<double>(scale), 2);
      return sum;
    };
    // With the same tensor scale the choice per block can only help.
    const float scale = nvfp4_weight_scale(amax, Nvfp4WeightRule::kFourOverSix);
    EXPECT_LE(error(Nvfp4WeightRule::kFourOverSix, scale), error(Nvfp4WeightRule::kAmax, scale) * (1 + 1e-12));
  }
  EXPECT_EQ(nvfp4_weight_scale(0, Nvfp4WeightRule::kAmax), 1);
  EXPECT_EQ(nvfp4_weight_scale(std::nanf(""), Nvfp4WeightRule::kAmax), 1);
  EXPECT_EQ(nvfp4_weight_scale(2688, Nvfp4WeightRule::kAmax), 1);
}

TEST_F(Blocks, Q8FollowsTheRule) {
  const std::pair<float, float> scales[] = {{448.0f, 1},     {449.0f, 2},     {3.0f, 0x1p-7f},
                                            {1.0f, 0x1p-8f}, {0.5f, 0x1p-9f}, {1e-5f, 0x1p-22f}};
  for (const auto& [amax, scale] : scales) {
    uint8_t code[2], byte[1];
    const float x[2] = {amax, -amax / 3};
    q8_quantize(x, 2, 128, code, byte);
    EXPECT_EQ(e8m0_to_float(byte[0]), scale) << amax;
  }
  for (int round = 0; round < 300; ++round) {
    const int64_t count = 1 + static_cast<int64_t>(rng_.below(300)), group = round % 2 == 0 ? 64 : 128;
    const std::vector<float> x = row(count);
    std::vector<uint8_t> codes(x.size()), bytes(x.size() / static_cast<size_t>(group) + 1);
    std::vector<float> back(x.size());
    q8_quantize(x.data(), count, group, codes.data(), bytes.data());
    q8_dequantize(codes.data(), bytes.data(), count, group, back.data());
    for (int64_t i = 0; i < count; ++i) {
      float amax = 1e-4f;
      for (int64_t j = i / group * group; j < std::min(count, i / group * group + group); ++j)
        amax = std::max(amax, std::fabs(x[static_cast<size_t>(j)]));
      const double scale = std::exp2(std::ceil(std::log2(static_cast<double>(amax * (1.0f / 448.0f)))));
      const size_t at = static_cast<size_t>(i);
      EXPECT_EQ(static_cast<double>(e8m0_to_float(bytes[static_cast<size_t>(i / group)])), scale);
      EXPECT_EQ(codes[at], e4m3_from_float(x[at] / static_cast<float>(scale)));
      EXPECT_EQ(bf16_round(back[at]), back[at]) << "exact in BF16";
    }
  }
}

TEST_F(Blocks, Q4FollowsTheRule) {
  const std::pair<float, float> scales[] = {{449.0f, 128}, {3.0f, 0.5f}, {1.0f, 0.25f}};
  for (const auto& [amax, scale] : scales) {
    std::vector<float> x(32);
    x[5] = -amax;
    uint8_t codes[16], byte[1];
    q4_quantize(x.data(), 32, codes, byte);
    EXPECT_EQ(e8m0_to_float(byte[0]), scale) << amax;
    float back[32];
    q4_dequantize(codes, byte, 32, back);
    for (int i = 0; i < 32; ++i)
      EXPECT_EQ(back[i], i == 5 ? -e2m1_to_float(e2m1_from_float(amax / scale)) * scale : 0) << i;
  }
}

TEST_F(Blocks, Fp8WeightBlocks) {
  std::vector<uint8_t> codes(300);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng_.below(0x7F));
  const float scales[3] = {0.5f, 3, 1e-3f};
  std::vector<float> out(300);
  fp8_block_dequantize_row(codes.data(), scales, 300, out.data());
  for (size_t i = 0; i < 300; ++i) EXPECT_EQ(out[i], e4m3_to_float(codes[i]) * scales[i / 128]);
}

// A scale that folds makes of every code a value that BF16 holds, and none of its neighbours or opposites folds.
TEST_F(Blocks, ScalesFoldWhereBf16HoldsEveryProduct) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    const float scale = std::ldexp(1.0f, exponent);
    EXPECT_EQ(fp8_scale_folds(scale), exponent >= -100 && exponent <= 7) << exponent;
    for (const float other : {-scale, std::nextafter(scale, 0.0f), std::nextafter(scale, 1e38f), 1.5f * scale}) {
      if (std::ldexp(1.0f, std::ilogb(other)) != other) EXPECT_FALSE(fp8_scale_folds(other)) << other;
    }
    if (!fp8_scale_folds(scale)) continue;
    for (int code = 0; code < 0x7F; ++code) {
      const float value = e4m3_to_float(static_cast<uint8_t>(code)) * scale;
      EXPECT_EQ(bf16_to_float(bf16_from_float(value)), value);
    }
  }
  EXPECT_TRUE(fp8_scale_folds(0.0f));
  for (const float scale : {-0.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_FALSE(fp8_scale_folds(scale));
  }
}

TEST_F(Blocks, PublishedVectors) {
  const std::string path = testing::golden_path("number-vectors.json");
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const Json json = Json::parse(text, path);
  const JsonCursor root(json, path), block = root.at("block");
  std::vector<float> x;
  for (const JsonCursor& value : block.at("x").elements()) x.push_back(static_cast<float>(value.number(-10, 10)));
  uint8_t codes[8], scale[1];
  nvfp4_quantize_weight_row(x.data(), 16, nvfp4_weight_scale(2, Nvfp4WeightRule::kAmax), Nvfp4WeightRule::kAmax, codes,
                            scale);
  EXPECT_EQ(scale[0], block.at("scale_byte").integer(0, 255));
  const std::vector<JsonCursor> packed = block.at("packed").elements();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(codes[i], packed[i].integer(0, 255)) << i;
  for (const JsonCursor& pair : root.at("e2m1").elements()) {
    EXPECT_EQ(e2m1_from_float(static_cast<float>(pair.elements()[0].number(-1e30, 1e30))),
              pair.elements()[1].integer(0, 15));
  }
  for (const JsonCursor& pair : root.at("e4m3").elements()) {
    EXPECT_EQ(e4m3_from_float(static_cast<float>(pair.elements()[0].number(-1e30, 1e30))),
              pair.elements()[1].integer(0, 255));
  }
}

TEST(ScaleLayout, SwizzleIsABijectionWithZeroPadding) {
  const std::pair<std::pair<int64_t, int64_t>, int64_t> known[] = {
      {{0, 0}, 0},   {{1, 0}, 16},      {{31, 3}, 499},     {{32, 0}, 4},         {{127, 3}, 511},
      {{0, 4}, 512}, {{128, 0}, 32768}, {{200, 77}, 42633}, {{2047, 255}, 524287}};
  for (const auto& [at, offset] : known) EXPECT_EQ(sf128x4_offset(at.first, at.second, 256), offset);
  EXPECT_EQ(sf128x4_offset(5, 6, 10), 594);
  for (const auto& [rows, groups] : {std::pair<int64_t, int64_t>{1, 1}, {128, 4}, {130, 7}, {257, 10}}) {
    std::vector<uint8_t> linear(static_cast<size_t>(rows * groups)), back(linear.size());
    for (size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<uint8_t>(1 + i % 255);
    std::vector<uint8_t> swizzled(static_cast<size_t>(sf128x4_size(rows, groups)), 0xEE);
    sf128x4_swizzle(linear.data(), rows, groups, swizzled.data());
    sf128x4_unswizzle(swizzled.data(), rows, groups, back.data());
    EXPECT_EQ(back, linear);
    EXPECT_EQ(std::count(swizzled.begin(), swizzled.end(), 0), static_cast<int64_t>(swizzled.size() - linear.size()));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t group = 0; group < groups; ++group) {
        const ScalePosition at = sf128x4_position(sf128x4_offset(row, group, groups), groups);
        EXPECT_TRUE(at.row == row && at.group == group);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::numeric
