// SPDX-License-Identifier: Apache-2.0
// MXFP4 as NVFP4: every scale, global and code; the count of what can't be represented; parts against the whole.
#include "numeric/mxfp4_to_nvfp4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "testing/seed.h"

namespace tessera::numeric {
namespace {

uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

class Mxfp4ToNvfp4 : public ::testing::Test {
 protected:
  Mxfp4ToNvfp4() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  struct Blocks {
    std::vector<uint8_t> codes, scales;
    int64_t count() const { return static_cast<int64_t>(scales.size()); }
  };
  // Random codes, scales in [low, low + span]; a tenth of the blocks zero (of either sign), with any scale but NaN.
  Blocks random_blocks(int64_t count, int low, int span) {
    Blocks blocks{std::vector<uint8_t>(static_cast<size_t>(count) * 16),
                  std::vector<uint8_t>(static_cast<size_t>(count))};
    for (uint8_t& byte : blocks.codes) byte = static_cast<uint8_t>(rng_.below(256));
    for (size_t b = 0; b < blocks.scales.size(); ++b) {
      blocks.scales[b] = static_cast<uint8_t>(low + static_cast<int>(rng_.below(static_cast<uint64_t>(span) + 1)));
      if (rng_.below(10) != 0) continue;
      for (size_t i = 0; i < 16; ++i) blocks.codes[b * 16 + i] &= 0x88;
      blocks.scales[b] = static_cast<uint8_t>(rng_.below(255));
    }
    return blocks;
  }

  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
};

TEST_F(Mxfp4ToNvfp4, PowersOfTwoAreThoseOfE4m3) {
  for (int exponent = kE4m3MinPower; exponent <= kE4m3MaxPower; ++exponent)
    EXPECT_EQ(e4m3_to_float(e4m3_power_of_two(exponent)), std::ldexp(1.0f, exponent)) << exponent;
  int num_powers = 0;
  for (int byte = 1; byte <= 0x7E; ++byte) {
    int exponent = 0;
    num_powers += std::frexp(e4m3_to_float(static_cast<uint8_t>(byte)), &exponent) == 0.5f ? 1 : 0;
  }
  EXPECT_EQ(num_powers, kE4m3MaxPower - kE4m3MinPower + 1) << "there are no others";
}

// All 255 scales under all globals that a census can choose: exact where representable, for all 16 codes; where not, no
// E4M3 byte would do.
TEST_F(Mxfp4ToNvfp4, EveryScaleUnderEveryGlobal) {
  for (int m = -126; m <= 119; ++m) {
    for (int scale = 0; scale <= 254; ++scale) {
      uint8_t codes[16], scales[1] = {static_cast<uint8_t>(scale)}, out[16], out_scales[2] = {0xEE, 0xEE};
      for (uint8_t i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(i | (15 - i) << 4);
      const int64_t rounded = mxfp4_to_nvfp4(codes, scales, 1, m, out, out_scales);
      ASSERT_EQ(out_scales[0], out_scales[1]);
      const double exact = std::ldexp(1.0, scale - 127 - m);
      const bool exists = std::any_of(kE4m3Values.begin(), kE4m3Values.begin() + 0x7F,
                                      [&](float value) { return static_cast<double>(value) == exact; });
      ASSERT_EQ(mxfp4_is_representable(scales[0], m), exists) << scale << " under " << m;
      ASSERT_EQ(rounded, exists ? 0 : 1);
      if (!exists) continue;
      ASSERT_EQ(std::memcmp(codes, out, 16), 0) << "codes are copied";
      float from[32], to[32];
      q4_dequantize(codes, scales, 32, from);
      nvfp4_dequantize_row(out, out_scales, 32, to);
      for (int i = 0; i < 32; ++i)
        ASSERT_EQ(bits_of(from[i]), bits_of(to[i] * mxfp4_global_scale(m))) << scale << " under " << m;
    }
  }
}

TEST_F(Mxfp4ToNvfp4, GlobalTakesTheLargestBlockAndSeventeenPowersBelow) {
  EXPECT_EQ(mxfp4_global_exponent(-1), 0);
  for (int max_scale = 0; max_scale <= 254; ++max_scale) {
    const int m = mxfp4_global_exponent(max_scale);
    EXPECT_TRUE(std::isnormal(mxfp4_global_scale(m)));
    EXPECT_EQ(mxfp4_global_scale(m), std::ldexp(1.0f, m));
    for (int scale = 0; scale <= max_scale; ++scale)
      EXPECT_EQ(mxfp4_is_representable(static_cast<uint8_t>(scale), m), max_scale - scale <= 17)
          << scale << " of " << max_scale;
  }
  // The published example: the largest block 2^-7 gives 2^-15 and these bytes.
  const int m = mxfp4_global_exponent(127 - 7);
  EXPECT_EQ(m, -15);
  const std::pair<int, int> known[] = {{-7, 0x78}, {-8, 0x70}, {-12, 0x50}, {-15, 0x38}, {-24, 0x01}};
  for (const auto& [power, byte] : known) EXPECT_EQ(e4m3_power_of_two(power - m), byte) << power;
  EXPECT_FALSE(mxfp4_is_representable(127 - 25, m));
}

TEST_F(Mxfp4ToNvfp4, CensusCountsAndAddsUp) {
  for (int round = 0; round < 200; ++round) {
    const int64_t count = 1 + static_cast<int64_t>(rng_.below(200));
    const int span = static_cast<int>(rng_.below(40)),
              low = static_cast<int>(rng_.below(static_cast<uint64_t>(255 - span)));
    const Blocks blocks = random_blocks(count, low, span);
    Mxfp4Census census, parts;
    census.add(blocks.codes.data(), blocks.scales.data(), count);
    const int64_t cut = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count) + 1));
    Mxfp4Census second;
    parts.add(blocks.codes.data(), blocks.scales.data(), cut);
    second.add(blocks.codes.data() + cut * 16, blocks.scales.data() + cut, count - cut);
    parts.add(second);
    EXPECT_EQ(parts.num_blocks, census.num_blocks);
    EXPECT_EQ(parts.num_zero_blocks, census.num_zero_blocks);
    std::vector<float> values(static_cast<size_t>(count) * 32);
    q4_dequantize(blocks.codes.data(), blocks.scales.data(), count * 32, values.data());
    int max_scale = -1;
    int64_t num_zero = 0;
    std::vector<bool> is_zero;
    for (size_t b = 0; b < blocks.scales.size(); ++b) {
      is_zero.push_back(abs_max(values.data() + b * 32, 32) == 0);
      num_zero += is_zero.back() ? 1 : 0;
      if (!is_zero.back()) max_scale = std::max<int>(max_scale, blocks.scales[b]);
    }
    EXPECT_EQ(census.max_scale(), max_scale);
    EXPECT_EQ(census.num_zero_blocks, num_zero);
    int64_t outside = 0;
    for (size_t b = 0; b < blocks.scales.size(); ++b)
      outside += !is_zero[b] && max_scale - blocks.scales[b] > 17 ? 1 : 0;
    EXPECT_EQ(census.num_unrepresentable(mxfp4_global_exponent(max_scale)), outside);
  }
  Mxfp4Census nan;
  const uint8_t codes[16] = {}, scale[1] = {kE8m0Nan};
  nan.add(codes, scale, 1);
  EXPECT_EQ(nan.num_nan(), 1) << "zeros under a NaN scale are NaN";
  EXPECT_EQ(nan.max_scale(), -1);
}

// Converting in parts, in place or not, gives the same bits; what is in the window comes back exactly, what is not is
// counted.
TEST_F(Mxfp4ToNvfp4, PartsGiveTheBitsOfTheWhole) {
  for (int round = 0; round < 100; ++round) {
    const int64_t count = 1 + static_cast<int64_t>(rng_.below(100));
    const int span = static_cast<int>(rng_.below(30)),
              low = static_cast<int>(rng_.below(static_cast<uint64_t>(255 - span)));
    Blocks blocks = random_blocks(count, low, span);
    Mxfp4Census census;
    census.add(blocks.codes.data(), blocks.scales.data(), count);
    const int m = mxfp4_global_exponent(census.max_scale());
    std::vector<uint8_t> codes(blocks.codes.size(), 0xEE), scales(blocks.scales.size() * 2, 0xEE), part_scales = scales;
    const int64_t rounded =
        mxfp4_to_nvfp4(blocks.codes.data(), blocks.scales.data(), count, m, codes.data(), scales.data());
    EXPECT_EQ(rounded, census.num_unrepresentable(m));
    std::vector<float> from(blocks.codes.size() * 2), to(from.size());
    q4_dequantize(blocks.codes.data(), blocks.scales.data(), count * 32, from.data());
    nvfp4_dequantize_row(codes.data(), scales.data(), count * 32, to.data());
    const float global = mxfp4_global_scale(m);
    for (size_t i = 0; i < from.size(); ++i) {
      const bool is_zero = mxfp4_block_is_zero(blocks.codes.data() + i / 32 * 16);
      if (is_zero || mxfp4_is_representable(blocks.scales[i / 32], m)) {
        ASSERT_EQ(bits_of(from[i]), bits_of(to[i] * global)) << i;
      } else {
        ASSERT_LE(std::fabs(static_cast<double>(from[i]) - static_cast<double>(to[i] * global)),
                  std::ldexp(0.25, m - 9));
      }
    }
    int64_t in_parts = 0;
    for (int64_t b = 0; b < count;) {
      const int64_t part = std::min(count - b, 1 + static_cast<int64_t>(rng_.below(9)));
      uint8_t* here = blocks.codes.data() + b * 16;
      in_parts += mxfp4_to_nvfp4(here, blocks.scales.data() + b, part, m, here, part_scales.data() + 2 * b);
      b += part;
    }
    EXPECT_EQ(in_parts, rounded);
    EXPECT_EQ(blocks.codes, codes);
    EXPECT_EQ(part_scales, scales);
  }
}

// Outside the window every code becomes the nearest multiple of the scale kept, ties to the even code.
TEST_F(Mxfp4ToNvfp4, RoundsToNearestOutsideTheWindow) {
  for (int distance = -200; distance <= 100; ++distance) {
    const int m = 0, scale = 127 + distance;
    if (scale < 0 || scale > 254 || mxfp4_is_representable(static_cast<uint8_t>(scale), m)) continue;
    const double kept = distance < 0 ? 0x1p-9 : 256;
    for (uint8_t code = 0; code < 16; ++code) {
      uint8_t codes[16] = {}, scales[1] = {static_cast<uint8_t>(scale)}, out[16], out_scales[2];
      codes[3] = 0x70, codes[7] = code;
      ASSERT_EQ(mxfp4_to_nvfp4(codes, scales, 1, m, out, out_scales), 1);
      ASSERT_EQ(static_cast<double>(e4m3_to_float(out_scales[1])), kept);
      // Far above 6 doubles no longer tell the distances apart.
      const double x =
          std::min(100.0, std::fabs(std::ldexp(static_cast<double>(e2m1_to_float(code)), distance)) / kept);
      uint8_t best = 0;
      for (uint8_t other = 1; other < 8; ++other) {
        const double here = std::fabs(static_cast<double>(e2m1_to_float(other)) - x);
        const double there = std::fabs(static_cast<double>(e2m1_to_float(best)) - x);
        if (here < there || (here == there && other % 2 == 0)) best = other;
      }
      EXPECT_EQ(out[7], best | (code & 8)) << "code " << int{code} << " at 2^" << distance;
    }
  }
}

TEST_F(Mxfp4ToNvfp4, NanStaysNanAndZerosKeepTheirSigns) {
  uint8_t codes[32] = {}, scales[2] = {kE8m0Nan, 3}, out[32], out_scales[4];
  for (int i = 16; i < 32; ++i) codes[i] = static_cast<uint8_t>(i % 2 == 0 ? 0x80 : 0x08);
  EXPECT_EQ(mxfp4_to_nvfp4(codes, scales, 2, 0, out, out_scales), 0);
  EXPECT_EQ(out_scales[0], kE4m3Nan);
  EXPECT_EQ(out_scales[1], kE4m3Nan);
  EXPECT_EQ(out_scales[2], 0);
  EXPECT_EQ(std::memcmp(codes, out, 32), 0);
}

}  // namespace
}  // namespace tessera::numeric
