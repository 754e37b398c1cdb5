// SPDX-License-Identifier: Apache-2.0
// E2M1, E4M3, UE8M0 and BF16: every code, every BF16 input, ties, signed zeros, NaN and infinities, against a search
// for the nearest value in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "numeric/bf16.h"
#include "numeric/e2m1_rounded.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "testing/seed.h"

namespace tessera::numeric {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

// Nearest code of |x| by search; ties go to the even code; above the largest value it saturates.
template <class Decode>
int nearest_code(float x, int num_codes, const Decode& decode) {
  double magnitude = 0, best_distance = INFINITY;
  for (int code = 0; code < num_codes; ++code)
    magnitude = std::fmax(magnitude, static_cast<double>(decode(static_cast<uint8_t>(code))));
  magnitude = std::fmin(magnitude, std::fabs(static_cast<double>(x)));
  int best = 0;
  for (int code = 0; code < num_codes; ++code) {
    const double value = static_cast<double>(decode(static_cast<uint8_t>(code)));
    if (std::isnan(value)) continue;
    const double distance = std::fabs(magnitude - value);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code, best_distance = distance;
  }
  return best;
}

void check(float x) {
  if (std::isnan(x)) return;
  EXPECT_EQ(e2m1_from_float(x), nearest_code(x, 8, e2m1_to_float) | (std::signbit(x) ? 8 : 0)) << x;
  EXPECT_EQ(e4m3_from_float(x), nearest_code(x, 128, e4m3_to_float) | (std::signbit(x) ? 0x80 : 0)) << x;
}

TEST(Formats, E2m1Values) {
  const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(e2m1_to_float(code), code < 8 ? magnitudes[code] : -magnitudes[code - 8]);
    EXPECT_EQ(std::signbit(e2m1_to_float(code)), code >= 8);
    EXPECT_EQ(e2m1_from_float(e2m1_to_float(code)), code);
  }
}

TEST(Formats, E4m3Values) {
  EXPECT_EQ(e4m3_to_float(0x7E), 448);
  EXPECT_EQ(e4m3_to_float(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(e4m3_to_float(0x08), std::ldexp(1.0f, -6));
  EXPECT_EQ(e4m3_to_float(0x38), 1);
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(std::isnan(value), (code & 0x7F) == 0x7F);
    if (!std::isnan(value)) {
      EXPECT_EQ(e4m3_from_float(value), code);
    }
    EXPECT_TRUE(std::memcmp(&value, &kE4m3Values[static_cast<size_t>(code)], 4) == 0);
  }
}

TEST(Formats, EveryBf16InputRoundsToTheNearest) {
  for (uint32_t bits = 0; bits < 65536; ++bits) check(bf16_to_float(static_cast<uint16_t>(bits)));
}

TEST(Formats, RandomBitPatternsRoundToTheNearest) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t bits = random();
    check(__builtin_bit_cast(float, bits));
  }
}

// The short way to an E2M1 code's value: every BF16 (all ties among them), and any others.
TEST(Formats, E2m1RoundedIsTheValueOfTheCode) {
  const auto expect_same = [](float value) {
    if (std::isnan(value)) return;
    const float found = e2m1_rounded(value), expected = e2m1_to_float(e2m1_from_float(value));
    EXPECT_EQ(std::memcmp(&found, &expected, sizeof(float)), 0) << value << ": " << found << ", not " << expected;
  };
  for (uint32_t bits = 0; bits < 65536; ++bits) expect_same(bf16_to_float(static_cast<uint16_t>(bits)));
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t bits = random();
    expect_same(__builtin_bit_cast(float, bits));
    expect_same(static_cast<float>(bits) * 0x1p-29f - 4);
  }
}

TEST(Formats, TiesGoToEvenAndSignsStay) {
  const std::pair<float, int> e2m1[] = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2}, {1.75f, 4}, {2.5f, 4},  {3.5f, 6},
                                        {5, 6},     {-0.1f, 8}, {-0.0f, 8}, {1e9f, 7},  {-kInf, 15}};
  for (const auto& [x, code] : e2m1) EXPECT_EQ(e2m1_from_float(x), code) << x;
  const std::pair<float, int> e4m3[] = {{448, 0x7E},  {464, 0x7E},   {1e30f, 0x7E},        {kInf, 0x7E}, {-kInf, 0xFE},
                                        {0x1p-9f, 1}, {0x1p-10f, 0}, {0x1.000002p-10f, 1}, {-0.0f, 0x80}};
  for (const auto& [x, code] : e4m3) EXPECT_EQ(e4m3_from_float(x), code) << x;
  EXPECT_EQ(e2m1_from_float(kNan), 7);
  EXPECT_EQ(e4m3_from_float(kNan), kE4m3Nan);
}

TEST(Formats, E8m0) {
  EXPECT_EQ(e8m0_to_float(127), 1);
  EXPECT_EQ(e8m0_to_float(0), 0x1p-127f);
  EXPECT_EQ(e8m0_to_float(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
  for (int byte = 0; byte < 255; ++byte) {
    const float value = e8m0_to_float(static_cast<uint8_t>(byte));
    EXPECT_EQ(e8m0_from_float_up(value), byte);
    if (byte < 254) {
      EXPECT_EQ(e8m0_from_float_up(std::nextafter(value, kInf)), byte + 1);
    }
  }
  EXPECT_EQ(e8m0_from_float_up(3), 129);
  EXPECT_EQ(e8m0_from_float_up(kInf), 254);
  EXPECT_EQ(e8m0_from_float_up(kNan), kE8m0Nan);
}

TEST(Formats, Bf16) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bf16_to_float(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_round(value)));
    } else {
      EXPECT_EQ(bf16_from_float(value), bits);
    }
  }
  EXPECT_EQ(bf16_from_float(1 + 0x1p-8f), 0x3F80);            // a tie, to even
  EXPECT_EQ(bf16_from_float(1 + 0x1p-7f + 0x1p-8f), 0x3F82);  // a tie, to even, upward
  EXPECT_EQ(bf16_from_float(std::nextafter(1 + 0x1p-8f, 2.0f)), 0x3F81);
  EXPECT_TRUE(std::isinf(bf16_round(std::numeric_limits<float>::max())));
  EXPECT_TRUE(std::isnan(bf16_round(__builtin_bit_cast(float, 0x7F800001u))));  // payload in the lower half only
}

}  // namespace
}  // namespace tessera::numeric
