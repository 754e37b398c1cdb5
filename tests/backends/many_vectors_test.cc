// SPDX-License-Identifier: Apache-2.0
// Norm, rope and Hadamard transform of so many vectors or rows that a GPU takes the kernels of many_vectors.cu: the
// bits of the same rows alone, which are few, and those of the reference, at numbers of vectors that leave a tail of a
// block and of a warp.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "numeric/bf16.h"
#include "ops/norm_rope/norm_rope.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

class ManyVectorsTest : public testing::RandomTest {
 protected:
  // Rows of BF16 vectors, with something in them that is not a number and something infinite.
  std::vector<uint16_t> vectors(int64_t count, int64_t width) {
    std::vector<float> values = testing::adversarial(rng_, count, width);
    for (const float odd : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      values[rng_.below(values.size())] = odd;
    }
    std::vector<uint16_t> all(values.size());
    std::transform(values.begin(), values.end(), all.begin(), numeric::bf16_from_float);
    return all;
  }
  // NaN has many bits.
  static std::vector<float> floats(const std::vector<uint16_t>& all) {
    std::vector<float> values;
    for (const uint16_t value : all) {
      values.push_back(numeric::bf16_to_float(value));
      if (std::isnan(values.back())) values.back() = std::nanf("");
    }
    return values;
  }
  // On a GPU sine and cosine may differ from the host's in the last bit.
  static void compare(const std::vector<uint16_t>& found, const std::vector<uint16_t>& expected, bool is_rotated) {
    std::vector<float> a = floats(found), b = floats(expected);
    if (testing::kGpuIsEmulated || !is_rotated) {
      EXPECT_TRUE(testing::same_bits(a, b));
      return;
    }
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(std::isfinite(a[i]), std::isfinite(b[i]));
      if (!std::isfinite(b[i])) a[i] = b[i] = 0;
    }
    EXPECT_TRUE(testing::is_close(a, b, testing::kBf16Bound));
  }
  // Enough for the kernels for many on up to 200 multiprocessors.
  const int64_t num_rows_ = (testing::kGpuIsEmulated ? 5 : 310) + static_cast<int64_t>(rng_.below(3));
  device::Queue queue_{2};
};

TEST_F(ManyVectorsTest, NormRope) {
  // A row alone is few, on the emulated GPU's multiprocessors too.
  constexpr int64_t kRope = 64, kQueries = testing::kGpuIsEmulated ? 35 : 67, kIndex = kQueries - 2;
  const ops::Hadamard::Desc hadamard{.width = 128, .is_fp4 = true};
  const ops::NormRope::Desc desc{
      {{.norm = ops::RmsNorm::Desc{.width = 512}, .rope = {.vectors = kQueries, .width = 512, .rope_dim = kRope}},
       {.norm = {}, .rope = {.vectors = kIndex, .width = 128, .rope_dim = kRope}, .hadamard = hadamard}}};
  const std::vector<uint16_t> queries = vectors(num_rows_ * kQueries, 512), index = vectors(num_rows_ * kIndex, 128);
  const std::vector<float> frequencies = ops::rope_frequencies(kRope, 160000, nullptr);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < num_rows_; ++t) positions.push_back(static_cast<int64_t>(rng_.below(1 << 20)));
  using Values = std::array<std::vector<uint16_t>, 2>;
  const auto run = [&](auto* call, int64_t first, int64_t count) {
    const auto rows = [&](const std::vector<uint16_t>& all, int64_t width) {
      return std::vector<uint16_t>(all.begin() + first * width, all.begin() + (first + count) * width);
    };
    Values values = {rows(queries, kQueries * 512), rows(index, kIndex * 128)};
    ops::NormRope::Args args;
    for (size_t i = 0; i < 2; ++i) {
      args.sets[i].x = {values[i].data(), DType::kBF16, {count, i == 0 ? kQueries : kIndex, i == 0 ? 512 : 128}};
      args.sets[i].positions = positions.data() + first, args.sets[i].frequencies = frequencies.data();
      args.sets[i].num_rows = count;
    }
    call(desc, args, queue_);
    return values;
  };
  const Values expected = run(ops::norm_rope_reference, 0, num_rows_);
  testing::for_each_variant<ops::NormRope>(desc, [&](const ops::Variant<ops::NormRope>& variant, bool) {
    const Values all = run(variant.run, 0, num_rows_);
    for (size_t i = 0; i < 2; ++i) compare(all[i], expected[i], true);
    for (const int64_t row : {int64_t{0}, num_rows_ / 2, num_rows_ - 1}) {
      const Values alone = run(variant.run, row, 1);
      for (size_t i = 0; i < 2; ++i) {
        const auto width = static_cast<std::ptrdiff_t>(alone[i].size());
        EXPECT_TRUE(std::equal(alone[i].begin(), alone[i].end(), all[i].begin() + row * width)) << "row " << row;
      }
    }
  });
}

TEST_F(ManyVectorsTest, RmsNormAndHadamard) {
  const int64_t count = num_rows_ * 67;
  const std::vector<uint16_t> x = vectors(count, 512);
  const ops::RmsNorm::Desc norm{.width = 512};
  const auto normalise = [&](auto* call) {
    std::vector<uint16_t> from = x, out(x.size());
    const ops::RmsNorm::Args args{.x = {from.data(), DType::kBF16, {count, 512}},
                                  .weight = {},
                                  .out = {out.data(), DType::kBF16, {count, 512}},
                                  .num_rows = count};
    call(norm, args, queue_);
    EXPECT_EQ(from, x);
    return out;
  };
  const std::vector<uint16_t> normalised = normalise(ops::rms_norm_reference);
  testing::for_each_variant<ops::RmsNorm>(norm, [&](const ops::Variant<ops::RmsNorm>& variant, bool) {
    if (testing::is_on_gpu(variant)) compare(normalise(variant.run), normalised, false);
  });
  const std::vector<uint16_t> narrow = vectors(count, 128);
  for (const bool is_fp4 : {false, true}) {
    const ops::Hadamard::Desc desc{.width = 128, .is_fp4 = is_fp4};
    const auto transform = [&](auto* call) {
      std::vector<uint16_t> values = narrow;
      call(desc, {.x = {values.data(), DType::kBF16, {count, 128}}, .num_rows = count}, queue_);
      return values;
    };
    const std::vector<uint16_t> transformed = transform(ops::hadamard_reference);
    testing::for_each_variant<ops::Hadamard>(desc, [&](const ops::Variant<ops::Hadamard>& variant, bool) {
      if (testing::is_on_gpu(variant)) compare(transform(variant.run), transformed, false);
    });
  }
}

// Rows of rms_norm with weights and without: 64 to 2,048 values, and beyond, which the kernel for few takes; into other
// memory or in place. Numbers of rows leave a tail of a block and of a warp.
TEST_F(ManyVectorsTest, RmsNormOfRows) {
  const int64_t count = (testing::kGpuIsEmulated ? 61 : 2801) + static_cast<int64_t>(rng_.below(3));
  enum class Weights { kNone, kF32, kBf16 };
  for (const int64_t width : {64, 192, 512, 1024, 1536, 2048, 2112}) {
    for (const Weights weights : {Weights::kNone, Weights::kF32, Weights::kBf16}) {
      SCOPED_TRACE(std::to_string(count) + " rows of " + std::to_string(width) + ", weights " +
                   std::to_string(static_cast<int>(weights)));
      const std::vector<uint16_t> x = vectors(count, width), halves = vectors(1, width);
      std::vector<float> floats_of_weights;
      for (int64_t i = 0; i < width; ++i) floats_of_weights.push_back(static_cast<float>(rng_.normal()));
      const ops::RmsNorm::Desc desc{.width = width};
      const auto normalise = [&](auto* call, int64_t first, int64_t num_rows, bool in_place) {
        std::vector<uint16_t> from(x.begin() + first * width, x.begin() + (first + num_rows) * width);
        std::vector<uint16_t> out(from.size(), 0xFFFF);
        ops::RmsNorm::Args args{.x = {from.data(), DType::kBF16, {num_rows, width}},
                                .weight = {},
                                .out = {in_place ? from.data() : out.data(), DType::kBF16, {num_rows, width}},
                                .num_rows = num_rows};
        if (weights == Weights::kF32) args.weight = {floats_of_weights.data(), DType::kF32, {width}};
        if (weights == Weights::kBf16) {
          args.weight = {const_cast<uint16_t*>(halves.data()), DType::kBF16, {width}};
        }
        call(desc, args, queue_);
        return in_place ? from : out;
      };
      const std::vector<uint16_t> expected = normalise(ops::rms_norm_reference, 0, count, false);
      testing::for_each_variant<ops::RmsNorm>(desc, [&](const ops::Variant<ops::RmsNorm>& variant, bool) {
        if (!testing::is_on_gpu(variant)) return;
        const std::vector<uint16_t> all = normalise(variant.run, 0, count, false);
        compare(all, expected, false);
        EXPECT_EQ(normalise(variant.run, 0, count, true), all);
        const std::vector<uint16_t> alone = normalise(variant.run, count - 1, 1, false);
        compare(alone, {all.end() - width, all.end()}, false);
      });
    }
  }
}

}  // namespace
}  // namespace tessera
