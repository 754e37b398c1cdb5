// SPDX-License-Identifier: Apache-2.0
// TESSERA_EMULATED_SUMS=fast: how far from the models' bits sums in FP32 may be, and that nobody has them unasked.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <string>

#include "backends/cuda_common/ptx/emulated/product_sums.h"
#include "backends/sums_mode.h"
#include "numeric/e4m3.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using namespace backends::cuda_common::ptx::emulated;

struct Step {
  int groups[kGroupsOfProduct] = {};
  uint8_t a[kGroupsOfProduct] = {}, b[kGroupsOfProduct] = {};
};

uint32_t word_of(const uint8_t (&bytes)[kGroupsOfProduct]) {
  return std::bit_cast<uint32_t>(bytes);
}

// Magnitudes of the old sum and of a step's terms together.
double magnitude(float old_sum, const Step& step) {
  double all = std::fabs(static_cast<double>(old_sum));
  for (size_t i = 0; i < kGroupsOfProduct; ++i) {
    all += std::fabs(step.groups[i] / 4.0 * static_cast<double>(numeric::e4m3_to_float(step.a[i])) *
                     static_cast<double>(numeric::e4m3_to_float(step.b[i])));
  }
  return all;
}

// How far the sums of a step may be from each other where the old ones are `apart`. FP32: four additions, each off by
// 2^-24 of what it gives, which the magnitudes bound (times 1 + 2^-20 for their own errors). The model: five numbers
// cut off 35 bits behind the largest exponent, the total cut off to FP32.
double bound_of(double apart, float fast, float exact, const Step& step) {
  int largest = split_f32(std::bit_cast<uint32_t>(exact)).exponent;
  for (size_t i = 0; i < kGroupsOfProduct; ++i) {
    largest = std::max(largest, split_ue4m3(step.a[i]).exponent + split_ue4m3(step.b[i]).exponent);
  }
  return apart + 0x1p-22 * (1 + 0x1p-20) * magnitude(fast, step) + 0x1p-23 * magnitude(exact, step) +
         5 * std::ldexp(1.0, largest - 35) + 0x1p-149;
}

class FastSumsTest : public testing::RandomTest {
 protected:
  // Scales of all sizes or nearly of one, groups of heavy tails, zeros among both.
  Step random_step() {
    Step step;
    const int least = below(0x7F), width = 1 + below(0x7F - least);
    for (size_t i = 0; i < kGroupsOfProduct; ++i) {
      step.groups[i] = (below(2 * 2304 + 1) - 2304) >> below(12);
      if (below(6) == 0) step.groups[i] = 0;
      step.a[i] = static_cast<uint8_t>(below(8) == 0 ? 0 : least + below(width));
      step.b[i] = static_cast<uint8_t>(below(0x7F) | below(2) << 7);
    }
    return step;
  }
  int below(int count) { return static_cast<int>(rng_.below(static_cast<uint64_t>(count))); }
};

// The model of mma.sync's sums is held to have the same bits elsewhere.
TEST_F(FastSumsTest, AreNearTheModels) {
  int num_different = 0;
  for (int run = 0; run < 20'000; ++run) {
    float fast = 0, exact = 0;
    if (below(4) == 0)
      fast = exact = static_cast<float>(std::ldexp(static_cast<double>(rng_.normal()), below(60) - 30));
    double bound = 0;
    const int steps = 1 + below(64);
    for (int i = 0; i < steps; ++i) {
      const Step step = random_step();
      bound = bound_of(bound, fast, exact, step);
      fast = mma_sync_sum(true, fast, step.groups, word_of(step.a), word_of(step.b));
      exact = std::bit_cast<float>(tcgen05_sum(false, std::bit_cast<uint32_t>(exact), step.groups, step.a, step.b));
      ASSERT_LE(std::fabs(static_cast<double>(fast) - static_cast<double>(exact)), bound)
          << "run " << run << ", step " << i << ": " << fast << ", " << exact;
    }
    num_different += fast != exact;
  }
  EXPECT_GT(num_different, 1000) << "they are the same sums";
}

// Where the models' sums need no cut and FP32 no rounding both have the exact sum.
TEST_F(FastSumsTest, OfFewBitsAreTheModels) {
  for (int run = 0; run < 1000; ++run) {
    Step step;
    const auto scale = [&] { return static_cast<uint8_t>((5 + below(4)) << 3); };  // 1/4 to 2
    for (size_t i = 0; i < kGroupsOfProduct; ++i)
      step.groups[i] = below(4609) - 2304, step.a[i] = scale(), step.b[i] = scale();
    const float old_sum = static_cast<float>(below(20001) - 10000) / 16;
    for (const bool is_fast : {false, true}) {
      EXPECT_EQ(mma_sync_sum(is_fast, old_sum, step.groups, word_of(step.a), word_of(step.b)), static_cast<float>([&] {
                  double sum = static_cast<double>(old_sum);
                  for (size_t i = 0; i < kGroupsOfProduct; ++i) {
                    sum += step.groups[i] / 4.0 * static_cast<double>(numeric::e4m3_to_float(step.a[i])) *
                           static_cast<double>(numeric::e4m3_to_float(step.b[i]));
                  }
                  return sum;
                }()));
    }
  }
}

TEST_F(FastSumsTest, NansInfinitiesAndZerosAreTheModels) {
  for (int run = 0; run < 2000; ++run) {
    Step step = random_step();
    uint32_t old_sum = std::bit_cast<uint32_t>(static_cast<float>(rng_.normal()));
    switch (below(4)) {
      case 0:
        step.a[below(4)] |= 0x7F;
        break;
      case 1:
        step.b[below(4)] |= 0x7F, step.groups[below(4)] = 0;
        break;
      case 2:
        old_sum = 0x7F800000u | static_cast<uint32_t>(below(3)) << 22 | static_cast<uint32_t>(below(2)) << 31;
        break;
      default:  // columns that are not there; a zero has no sign
        if (below(2) == 0) old_sum = 0x80000000u * static_cast<uint32_t>(below(2));
        std::fill_n(step.a, 4, 0), std::fill_n(step.groups, 4, -below(3));
    }
    const uint32_t exact = tcgen05_sum(false, old_sum, step.groups, step.a, step.b);
    EXPECT_EQ(tcgen05_sum(true, old_sum, step.groups, step.a, step.b), exact) << std::hex << old_sum;
  }
}

TEST_F(FastSumsTest, AreWhatWasAskedForAndExactUnasked) {
  const char* asked = std::getenv("TESSERA_EMULATED_SUMS");
  EXPECT_EQ(sums_are_fast(), asked != nullptr && std::string(asked) == "fast");
  const uint32_t old_sum = std::bit_cast<uint32_t>(0x1p24f);
  const Step step{.groups = {7, 0, 0, 0}, .a = {0x38, 0, 0, 0}, .b = {0x38, 0, 0, 0}};
  const auto sum = [&](bool is_fast) {
    const testing::SumsMode mode(is_fast);
    return std::bit_cast<float>(tcgen05_sum(sums_are_fast(), old_sum, step.groups, step.a, step.b));
  };
  EXPECT_EQ(sum(false), 0x1p24f) << "1.75 is cut off";
  EXPECT_EQ(sum(true), 0x1.000002p24f) << "and rounded";
}

}  // namespace
}  // namespace tessera
