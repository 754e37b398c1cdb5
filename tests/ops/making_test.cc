// SPDX-License-Identifier: Apache-2.0
// The ops that make weights: numbers made up, and matrices quantised to NVFP4. Every variant gives the reference's
// bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "numeric/bf16.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::QuantizeNvfp4;
using ops::RandomFill;
using Kind = RandomFill::Kind;
using Rule = QuantizeNvfp4::Rule;

class MakingTest : public testing::RandomTest {};

// The first outputs of SplitMix64 from 1234567, as its authors' program prints them.
TEST(RandomFill, IsSplitMix64) {
  constexpr uint64_t kWords[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u, 4593380528125082431u,
                                 16408922859458223821u};
  for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(ops::random_word(1234567, i), kWords[i]);
  std::vector<uint8_t> bytes(37, 0xEE);
  device::Queue queue(2);
  ops::random_fill_reference({Kind::kCodes, DType::kU8}, {.out = bytes.data(), .count = 36, .seed = 1234567}, queue);
  EXPECT_EQ(std::memcmp(bytes.data(), kWords, 36), 0);
  EXPECT_EQ(bytes[36], 0xEE);
}

TEST_F(MakingTest, ScalesAndNormalValuesAreWhatTheySay) {
  constexpr int64_t kCount = 20000;
  device::Queue queue(2);
  std::vector<uint8_t> scales(kCount);
  std::vector<float> values(kCount);
  ops::random_fill_reference({Kind::kScales, DType::kU8}, {.out = scales.data(), .count = kCount, .seed = seed_},
                             queue);
  EXPECT_EQ(*std::min_element(scales.begin(), scales.end()), 0x28);
  EXPECT_EQ(*std::max_element(scales.begin(), scales.end()), 0x47);
  std::vector<uint8_t> codes(kCount);
  ops::random_fill_reference({Kind::kE4m3, DType::kU8}, {.out = codes.data(), .count = kCount, .seed = seed_}, queue);
  std::array<int, 256> counts{};
  for (const uint8_t code : codes) ++counts[code];
  for (int code = 0; code < 256; ++code) EXPECT_EQ(counts[static_cast<size_t>(code)] > 0, (code & 0x40) == 0) << code;
  ops::random_fill_reference({Kind::kNormal, DType::kF32},
                             {.out = values.data(), .count = kCount, .seed = seed_, .center = 2, .spread = 0.5f},
                             queue);
  double sum = 0, squares = 0;
  for (const float value : values)
    sum += static_cast<double>(value), squares += std::pow(static_cast<double>(value) - 2, 2);
  EXPECT_NEAR(sum / kCount, 2, 0.025);
  EXPECT_NEAR(std::sqrt(squares / kCount), 0.5, 0.02);
}

TEST_F(MakingTest, VariantsFillWithTheReferencesBytes) {
  for (const RandomFill::Desc& desc : {RandomFill::Desc{Kind::kCodes, DType::kU8},
                                       {Kind::kScales, DType::kU8},
                                       {Kind::kE4m3, DType::kU8},
                                       {Kind::kNormal, DType::kF32},
                                       {Kind::kNormal, DType::kBF16}}) {
    for (const int64_t count : {0, 1, 7, 8, 9, 255, 4099}) {
      SCOPED_TRACE(count);
      const size_t bytes = static_cast<size_t>(count * dtype_bits(desc.dtype) / 8);
      RandomFill::Args args{.count = count, .seed = rng_.next_u64(), .center = rng_.normal(), .spread = rng_.normal()};
      device::Queue queue(2);
      const auto fill = [&](auto&& run) {
        const device::Buffer out(bytes + 8);
        std::memset(out.data(), 0xEE, bytes + 8);
        args.out = out.data();
        run(desc, args, queue);
        return std::vector<uint8_t>(out.as<uint8_t>(), out.as<uint8_t>() + bytes + 8);
      };
      const std::vector<uint8_t> expected = fill(ops::random_fill_reference);
      EXPECT_EQ(std::count(expected.end() - 8, expected.end(), 0xEE), 8);
      testing::for_each_variant<RandomFill>(
          desc, [&](const ops::Variant<RandomFill>& variant, bool) { EXPECT_EQ(fill(variant.run), expected); });
    }
  }
}

// What is bad lies in one value; heavy tails, zero rows and denormals are in the others.
TEST_F(MakingTest, VariantsQuantiseToTheReferencesBytes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  for (const Rule rule : {Rule::kRows, Rule::kTensor, Rule::kFourOverSix}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 16}, {3, 48}, {17, 2064}}) {
        for (const float bad : {0.0f, 0.0f, nan, -nan, -kInfinity}) {
          SCOPED_TRACE(::testing::Message() << rows << " rows of " << width << ", bad " << bad);
          std::vector<float> values(static_cast<size_t>(rows * width));
          for (float& value : values) value = rng_.normal() * (rng_.below(50) == 0 ? 50 : 1);
          const size_t row = rng_.below(static_cast<uint64_t>(rows)) * static_cast<size_t>(width);
          for (size_t i = row; i < row + static_cast<size_t>(width); ++i)
            values[i] *= rng_.below(2) == 0 ? 1e-41f : 0.0f;
          if (rows > 1 && rng_.below(2) == 0) std::fill_n(values.begin() + static_cast<int64_t>(row), width, -0.0f);
          if (bad != 0) values[rng_.below(values.size())] = bad;
          const device::Tensor x(dtype, {rows, width});
          for (size_t i = 0; i < values.size(); ++i) {
            if (dtype == DType::kF32) {
              x.as<float>()[i] = values[i];
            } else {
              x.as<uint16_t>()[i] = numeric::bf16_from_float(values[i]);
            }
          }
          struct Result {
            std::vector<uint8_t> codes, scales, globals;
            bool operator==(const Result&) const = default;
          };
          const size_t num_globals = rule == Rule::kRows ? static_cast<size_t>(rows) : 1;
          const auto quantise = [&](auto&& run) {
            Result result{std::vector<uint8_t>(values.size() / 2, 0xEE), std::vector<uint8_t>(values.size() / 16, 0xEE),
                          std::vector<uint8_t>(num_globals * 4, 0xEE)};
            const device::Buffer globals(num_globals * 4);
            device::Queue queue(2);
            run(QuantizeNvfp4::Desc{rule, dtype},
                QuantizeNvfp4::Args{x, result.codes.data(), result.scales.data(), globals.as<float>()}, queue);
            std::memcpy(result.globals.data(), globals.data(), num_globals * 4);
            return result;
          };
          const Result expected = quantise(ops::quantize_nvfp4_reference);
          const bool has_nan = std::count(expected.scales.begin(), expected.scales.end(), 0x7F) > 0;
          EXPECT_EQ(has_nan, bad != 0);
          testing::for_each_variant<QuantizeNvfp4>({rule, dtype},
                                                   [&](const ops::Variant<QuantizeNvfp4>& variant, bool) {
                                                     EXPECT_TRUE(quantise(variant.run) == expected);
                                                   });
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
