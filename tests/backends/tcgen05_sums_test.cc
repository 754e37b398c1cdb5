// SPDX-License-Identifier: Apache-2.0
// The whole-number model of what Blackwell's block-scaled product adds, against the same rules in floating point that
// is wide enough to be exact, against the model of mma.sync's step, which somebody else wrote, and cases by hand.
#include "backends/cuda_common/ptx/emulated/tcgen05_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "backends/cuda_common/ptx/emulated/block_scaled_sums.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using namespace backends::cuda_common::ptx::emulated;

struct Product {
  uint32_t old_sum = 0;
  int groups[kGroupsOfProduct] = {};
  uint8_t a[kGroupsOfProduct] = {}, b[kGroupsOfProduct] = {};
};

uint32_t sum_of(const Product& p) {
  return add_scaled_groups(p.old_sum, p.groups, p.a, p.b);
}

// value = significand * 2^exponent, 1 <= |significand| < 2 but for subnormal values, which have the least exponent.
int exponent_of(double value, int least) {
  return value == 0 ? -126 : std::max(std::ilogb(value), least);
}

// The rules once more, in long double: 64 bits hold every number that occurs here.
uint32_t expected_sum(const Product& p) {
  long double values[kGroupsOfProduct + 1];
  int exponents[kGroupsOfProduct + 1];
  values[kGroupsOfProduct] = std::bit_cast<float>(p.old_sum);
  exponents[kGroupsOfProduct] = exponent_of(std::bit_cast<float>(p.old_sum), -126);
  for (int i = 0; i < kGroupsOfProduct; ++i) {
    const double a = static_cast<double>(std::fabs(numeric::e4m3_to_float(p.a[i]))),
                 b = static_cast<double>(std::fabs(numeric::e4m3_to_float(p.b[i])));
    values[i] = static_cast<long double>(p.groups[i]) / 4 * static_cast<long double>(a) * static_cast<long double>(b);
    exponents[i] = exponent_of(a, -6) + exponent_of(b, -6);
  }
  const int largest = *std::max_element(exponents, exponents + kGroupsOfProduct + 1);
  long double sum = 0;
  for (const long double value : values) sum += std::trunc(std::ldexp(value, 35 - largest));
  sum = std::ldexp(sum, largest - 35);
  if (sum == 0) return 0;
  const int last = std::max(std::ilogb(sum), -126) - 23;
  return std::bit_cast<uint32_t>(static_cast<float>(std::ldexp(std::trunc(std::ldexp(sum, -last)), last)));
}

class Tcgen05SumsTest : public testing::RandomTest {
 protected:
  Product random_product() {
    Product p;
    const int spread = static_cast<int>(rng_.below(60));
    p.old_sum = std::bit_cast<uint32_t>(static_cast<float>(
        std::ldexp(static_cast<double>(rng_.normal()), static_cast<int>(rng_.below(61)) % (spread + 1) - spread / 2)));
    if (rng_.below(8) == 0) p.old_sum = 0;
    const int least = static_cast<int>(rng_.below(0x7F)), width = 1 + static_cast<int>(rng_.below(0x7F - least));
    for (int i = 0; i < kGroupsOfProduct; ++i) {
      p.groups[i] = static_cast<int>(rng_.below(2 * 2304 + 1)) - 2304;
      if (rng_.below(4) == 0) p.groups[i] /= 256;
      p.a[i] = static_cast<uint8_t>(least + static_cast<int>(rng_.below(static_cast<uint64_t>(width))));
      p.b[i] = static_cast<uint8_t>(rng_.below(0x7F) | rng_.below(2) << 7);
    }
    return p;
  }
};

// Both instructions are measured to add alike; the two models were written apart, from the same description.
TEST_F(Tcgen05SumsTest, TheModelOfMmaSyncAddsTheSame) {
  for (int run = 0; run < 200000; ++run) {
    Product p = random_product();
    if (rng_.below(50) == 0) p.a[rng_.below(kGroupsOfProduct)] = 0x7F;
    if (rng_.below(50) == 0) p.old_sum = 0x7FC00000;
    uint32_t a = 0, b = 0;
    for (int i = 0; i < kGroupsOfProduct; ++i) a |= uint32_t{p.a[i]} << 8 * i, b |= uint32_t{p.b[i]} << 8 * i;
    ASSERT_EQ(std::bit_cast<uint32_t>(block_scaled_sum(p.groups, a, b, std::bit_cast<float>(p.old_sum))), sum_of(p))
        << std::hex << p.old_sum << " " << a << " " << b;
  }
}

TEST_F(Tcgen05SumsTest, HalvesAndScalesAreTheFormats) {
  for (uint32_t code = 0; code < 16; ++code) {
    EXPECT_EQ(halves_of_e2m1(code), 2 * numeric::e2m1_to_float(static_cast<uint8_t>(code))) << code;
  }
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(is_ue4m3_nan(byte), std::isnan(numeric::e4m3_to_float(byte)));
    if (is_ue4m3_nan(byte)) continue;
    const SplitNumber split = split_ue4m3(byte);
    EXPECT_EQ(std::ldexp(static_cast<double>(split.significand), split.exponent - 3),
              static_cast<double>(std::fabs(numeric::e4m3_to_float(byte))));
  }
}

TEST_F(Tcgen05SumsTest, EqualsTheRulesInWideFloatingPoint) {
  for (int i = 0; i < 200'000; ++i) {
    const Product p = random_product();
    ASSERT_EQ(sum_of(p), expected_sum(p)) << i << ": old sum " << std::bit_cast<float>(p.old_sum);
  }
}

TEST_F(Tcgen05SumsTest, CutsOffTowardsZero) {
  const uint8_t one = numeric::e4m3_from_float(1);
  const auto bits = [](double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)); };
  Product p{.old_sum = bits(0x1p24), .groups = {4, 0, 0, 0}, .a = {one, one, one, one}, .b = {one, one, one, one}};
  EXPECT_EQ(sum_of(p), bits(0x1p24)) << "1 is half of the last place";
  p.groups[0] = 7;
  EXPECT_EQ(sum_of(p), bits(0x1p24)) << "1.75 is not rounded up";
  p.old_sum = bits(-0x1p24), p.groups[0] = 1;
  EXPECT_EQ(sum_of(p), bits(-0x1.fffffep23)) << "towards zero from below";
  // 35 bits behind the binary point of the largest: a quarter vanishes beside 2^34, though what is left is exact.
  p.old_sum = bits(0x1p34), p.groups[0] = 1, p.groups[1] = 0;
  EXPECT_EQ(sum_of(p), bits(0x1p34));
  // Groups that cancel leave what a third adds, unless it was cut off before: 16 * 256 * 256 has the exponent 8 + 8.
  const uint8_t large = numeric::e4m3_from_float(256), least = 1;  // 2^-9
  p = {.old_sum = 0, .groups = {64, -64, 1, 0}, .a = {large, large, one, one}, .b = {large, large, one, one}};
  EXPECT_EQ(sum_of(p), bits(0.25));
  p.a[2] = p.b[2] = least;
  EXPECT_EQ(sum_of(p), 0u) << "2^-20 stands 36 places behind 2^16";
  p.groups[2] = 2;
  EXPECT_EQ(sum_of(p), bits(0x1p-19));
}

TEST_F(Tcgen05SumsTest, NanZeroAndLargeValues) {
  Product p = random_product();
  p.a[2] = 0xFF;
  EXPECT_EQ(sum_of(p), kSumOfNan) << "the sign of a scale is ignored";
  p = random_product(), p.old_sum = 0xFFC00000;
  EXPECT_EQ(sum_of(p), kSumOfNan);
  p.old_sum = 0x80000000, std::fill_n(p.groups, 4, 0);
  EXPECT_EQ(sum_of(p), 0u) << "a zero has no sign";
  p.old_sum = 0x7F7FFFFF, std::fill_n(p.groups, 4, 2304), std::fill_n(p.a, 4, 0x7E), std::fill_n(p.b, 4, 0x7E);
  EXPECT_EQ(sum_of(p), 0x7F7FFFFFu);
  p.old_sum = 0xFF800000;
  EXPECT_EQ(sum_of(p), 0xFF800000u);
  // Columns that are not there: zero codes and zero scales change nothing.
  for (int i = 0; i < 1000; ++i) {
    p = random_product();
    std::fill_n(p.groups, 4, 0), std::fill_n(p.a, 4, 0), std::fill_n(p.b, 4, 0);
    EXPECT_EQ(sum_of(p), p.old_sum);
  }
}

}  // namespace
}  // namespace tessera
