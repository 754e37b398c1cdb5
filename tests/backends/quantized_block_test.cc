// SPDX-License-Identifier: Apache-2.0
// Blocks of NVFP4 activations as Blackwell's kernels make them have the bits of numeric::nvfp4_quantize_row, where
// quotients lie between two codes too, and where steps are too small or too large for a reciprocal.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "backends/cuda_common/quantized_block.cuh"
#include "base/rng.h"
#include "testing/seed.h"

namespace tessera {
namespace {

using numeric::kNvfp4Block;

void expect_same_block(const float (&values)[kNvfp4Block], float g) {
  uint8_t codes[kNvfp4Block / 2], scale;
  numeric::nvfp4_quantize_row(values, kNvfp4Block, g, codes, &scale);
  const backends::cuda_common::QuantizedBlock found =
      backends::cuda_common::quantize_block(values, numeric::abs_max(values, kNvfp4Block), g);
  ASSERT_EQ(found.scale, scale) << "g " << g;
  for (int i = 0; i < kNvfp4Block / 2; ++i) {
    ASSERT_EQ(found.codes >> 8 * i & 0xFF, codes[i])
        << "values " << values[2 * i] << ", " << values[2 * i + 1] << ", scale " << int{scale} << ", g " << g;
  }
}

TEST(QuantizedBlock, HasTheBitsOfDivisions) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  constexpr float kBetween[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};  // two codes
  for (int trial = 0; trial < 20000; ++trial) {
    // Rows of ordinary size, and a few beyond.
    const int exponent = trial % 8 == 0 ? static_cast<int>(rng.below(250)) - 125 : static_cast<int>(rng.below(24)) - 12;
    const float g = std::ldexp(1 + rng.uniform(), exponent);
    const auto wanted = static_cast<uint8_t>(1 + rng.below(numeric::kE4m3Nan - 1));
    const float step = numeric::e4m3_to_float(wanted) * g;
    float values[kNvfp4Block];
    for (float& value : values) {
      value = kBetween[rng.below(std::size(kBetween))] * step;
      const auto away = static_cast<int>(rng.below(7)) - 3;  // so many of the numbers next to it
      for (int i = 0; i < std::abs(away); ++i) {
        value = std::nextafter(value, away < 0 ? 0 : std::numeric_limits<float>::infinity());
      }
      if (rng.below(2) == 0) value = -value;
    }
    values[rng.below(kNvfp4Block)] = 6 * step;  // so that the scale is that one
    expect_same_block(values, g);
  }
}

TEST(QuantizedBlock, NumbersThatHaveNoScale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float g : {0.0f, 1e-40f, 1e-30f, 1.0f, 1e30f, kInfinity, kNan}) {
    for (const float other : {0.0f, -0.0f, 1e-42f, 3.0f, 3e38f, kInfinity, kNan}) {
      float values[kNvfp4Block] = {0, -0.0f, 1, -1e-45f, 5, -1e20f};
      values[9] = other;
      expect_same_block(values, g);
    }
  }
}

}  // namespace
}  // namespace tessera
