// SPDX-License-Identifier: Apache-2.0
// linear and moe_experts against double, over formats, modes, groups and token counts; and their invariances bit for
// bit.
#include <gtest/gtest.h>

#include <cmath>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/reference_rows.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

using ops::InputMode;
using ops::WeightFormat;

// What the multiply sees of a row, in double, from the rules: E4M3 by 128 with power-of-two scales, or NVFP4.
std::vector<double> seen_row(InputMode mode, const float* x, int64_t width, float bound) {
  std::vector<double> out(x, x + width);
  if (mode == InputMode::kA8) {
    for (int64_t b = 0; b < width; b += 128) {
      const int64_t end = std::min(width, b + 128);
      float amax = 1e-4f;
      for (int64_t k = b; k < end; ++k) amax = std::max(amax, std::fabs(x[k]));
      const float scale = std::exp2(std::ceil(std::log2(amax * (1.0f / 448.0f))));
      for (int64_t k = b; k < end; ++k)
        out[static_cast<size_t>(k)] =
            static_cast<double>(numeric::e4m3_to_float(numeric::e4m3_from_float(x[k] / scale)) * scale);
    }
  }
  if (mode == InputMode::kA4) {
    float g = bound;
    if (g == 0) {
      float amax = 0;
      for (int64_t k = 0; k < width; ++k) amax = std::max(amax, std::fabs(x[k]));
      g = amax == 0 ? 1 : amax / 2688;
    }
    for (int64_t b = 0; b < width; b += 16) {
      float amax = 0;
      for (int64_t k = b; k < b + 16; ++k) amax = std::max(amax, std::fabs(x[k]));
      const float scale = g == 0 ? 0 : numeric::e4m3_to_float(numeric::e4m3_from_float(amax / (6 * g)));
      for (int64_t k = b; k < b + 16; ++k) {
        const float code = scale * g == 0 ? 0 : numeric::e2m1_to_float(numeric::e2m1_from_float(x[k] / (scale * g)));
        out[static_cast<size_t>(k)] = static_cast<double>(code) * static_cast<double>(scale) * static_cast<double>(g);
      }
    }
  }
  return out;
}

class LinearTest : public testing::RandomTest {
 protected:
  void check(const ops::Linear::Desc& desc, int64_t tokens);
};

void LinearTest::check(const ops::Linear::Desc& desc, int64_t tokens) {
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.groups * desc.out, desc.in);
  const std::vector<double> w = weight.values();
  std::vector<float> x = testing::adversarial(rng_, tokens, desc.groups * desc.in);
  const device::Tensor input = testing::as_tensor(x, desc.activation, {tokens, desc.groups * desc.in});
  ops::load_floats(input, 0, static_cast<int64_t>(x.size()), x.data());  // as rounded when stored
  std::vector<float> expected(static_cast<size_t>(tokens * desc.groups * desc.out));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t g = 0; g < desc.groups; ++g) {
      const std::vector<double> row = seen_row(desc.input, x.data() + (t * desc.groups + g) * desc.in, desc.in, 0);
      for (int64_t n = 0; n < desc.out; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < desc.in; ++k)
          sum += row[static_cast<size_t>(k)] * w[static_cast<size_t>((g * desc.out + n) * desc.in + k)];
        expected[static_cast<size_t>((t * desc.groups + g) * desc.out + n)] = static_cast<float>(sum);
      }
    }
  }
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const auto run = [&](int threads, int64_t first, int64_t count) {
      return testing::run_linear(variant, desc, input, packed.view, first, count, threads);
    };
    const std::vector<float> all = run(1, 0, tokens);
    EXPECT_TRUE(
        testing::is_close(all, expected, desc.output == DType::kF32 ? testing::kF32Bound : testing::kBf16Bound));
    EXPECT_TRUE(testing::same_bits(run(2, 0, tokens), all)) << "threads";
    for (int64_t t = 0; t < tokens; ++t) {
      const size_t out = static_cast<size_t>(desc.groups * desc.out);
      EXPECT_TRUE(testing::same_bits(run(1, t, 1), std::span(all).subspan(static_cast<size_t>(t) * out, out)))
          << "row " << t << " alone";
    }
  });
}

TEST_F(LinearTest, EveryFormatAndMode) {
  for (const auto format : {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    for (const auto mode : {InputMode::kF32, InputMode::kA16, InputMode::kA8, InputMode::kA4}) {
      if (mode == InputMode::kA4 && format != WeightFormat::kNvfp4) continue;
      const DType activation = mode == InputMode::kF32 ? DType::kF32 : DType::kBF16;
      for (const DType output : {activation, DType::kF32}) {
        for (const int64_t tokens : {0, 1, 2, 7, 17}) {
          if (testing::kIsSanitized && (tokens == 2 || tokens == 7)) continue;
          check({.in = 16 * (1 + static_cast<int64_t>(rng_.below(20))),
                 .out = 1 + static_cast<int64_t>(rng_.below(70)),
                 .groups = 1 + static_cast<int64_t>(rng_.below(3)),
                 .format = format,
                 .input = mode,
                 .activation = activation,
                 .output = output},
                tokens);
        }
      }
    }
  }
}

TEST_F(LinearTest, OddWidths) {
  for (const int64_t in : {1, 3, 15, 17, 127, 129, 300}) {
    check({.in = in,
           .out = 5,
           .format = WeightFormat::kF32,
           .input = InputMode::kF32,
           .activation = DType::kF32,
           .output = DType::kF32},
          3);
    check({.in = in,
           .out = 5,
           .format = WeightFormat::kFp8Block,
           .input = InputMode::kA8,
           .activation = DType::kBF16,
           .output = DType::kF32},
          3);
  }
}

// A single non-zero input reads out one column: finds every permutation.
TEST_F(LinearTest, OneHotInputsReadColumns) {
  const ops::Linear::Desc desc{.in = 64,
                               .out = 9,
                               .format = WeightFormat::kNvfp4,
                               .input = InputMode::kA16,
                               .activation = DType::kBF16,
                               .output = DType::kF32};
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, 9, 64);
  const std::vector<double> w = weight.values();
  std::vector<float> x(64 * 64);
  for (size_t k = 0; k < 64; ++k) x[k * 64 + k] = 1;
  const device::Tensor input = testing::as_tensor(x, DType::kBF16, {64, 64});
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    const device::Buffer workspace = testing::workspace_for(variant, desc, 64);
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    testing::PoisonedTensor y(DType::kF32, {64, 9});
    device::Queue queue(2);
    variant.run(desc,
                {.x = input, .weight = packed.view, .y = y.view(), .num_tokens = 64, .workspace = workspace.data()},
                queue);
    const std::vector<float> found = y.floats();
    for (size_t k = 0; k < 64; ++k) {
      for (size_t n = 0; n < 9; ++n)
        EXPECT_FLOAT_EQ(found[k * 9 + n], static_cast<float>(w[n * 64 + k])) << k << " " << n;
    }
  });
}

TEST_F(LinearTest, NanPoisonsItsRowOnly) {
  for (const auto mode : {InputMode::kA16, InputMode::kA8, InputMode::kA4}) {
    const ops::Linear::Desc desc{.in = 128,
                                 .out = 8,
                                 .format = WeightFormat::kNvfp4,
                                 .input = mode,
                                 .activation = DType::kBF16,
                                 .output = DType::kBF16};
    const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, 8, 128);
    std::vector<float> x = testing::adversarial(rng_, 3, 128);
    x[128 + 5] = std::nanf("");
    const device::Tensor input = testing::as_tensor(x, DType::kBF16, {3, 128});
    testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
      const device::Buffer workspace = testing::workspace_for(variant, desc, 3);
      const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
      testing::PoisonedTensor y(DType::kBF16, {3, 8});
      device::Queue queue(1);
      variant.run(desc,
                  {.x = input, .weight = packed.view, .y = y.view(), .num_tokens = 3, .workspace = workspace.data()},
                  queue);
      const std::vector<float> found = y.floats();
      for (size_t i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(found[i]), i / 8 == 1) << i;
    });
  }
}

class MoeTest : public testing::RandomTest {
 protected:
  void check(InputMode mode, WeightFormat format, int64_t tokens, int64_t first, int64_t local, float limit);
};

void MoeTest::check(InputMode mode, WeightFormat format, int64_t tokens, int64_t first, int64_t local, float limit) {
  constexpr int64_t kHidden = 48, kInner = 32, kExperts = 6, kTopK = 3;
  const DType activation = mode == InputMode::kF32 ? DType::kF32 : DType::kBF16;
  const ops::MoeExperts::Desc desc{.hidden = kHidden,
                                   .inner = kInner,
                                   .first_expert = first,
                                   .num_local = local,
                                   .top_k = kTopK,
                                   .format = format,
                                   .input = mode,
                                   .swiglu_limit = limit,
                                   .activation = activation};
  std::vector<testing::RandomWeight> w1, w3, w2;
  std::vector<ops::WeightView> v1, v3, v2;
  for (int64_t e = 0; e < local; ++e) {
    // Gate and up have different tensor scales.
    w1.push_back(testing::random_weight(rng_, format, kInner, kHidden));
    w3.push_back(testing::random_weight(rng_, format, kInner, kHidden));
    w2.push_back(testing::random_weight(rng_, format, kHidden, kInner));
  }
  for (size_t e = 0; e < w1.size(); ++e) v1.push_back(w1[e].view), v3.push_back(w3[e].view), v2.push_back(w2[e].view);
  std::vector<float> x = testing::adversarial(rng_, tokens, kHidden);
  const device::Tensor input = testing::as_tensor(x, activation, {tokens, kHidden});
  ops::load_floats(input, 0, static_cast<int64_t>(x.size()), x.data());  // as rounded when stored
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> all = {0, 1, 2, 3, 4, 5};
    for (int64_t i = 0; i < kTopK; ++i)
      std::swap(all[static_cast<size_t>(i)],
                all[static_cast<size_t>(i) + rng_.below(static_cast<uint64_t>(kExperts - i))]);
    std::sort(all.begin(), all.begin() + kTopK);
    for (int64_t i = 0; i < kTopK; ++i) ids.push_back(all[static_cast<size_t>(i)]), routing.push_back(rng_.uniform());
  }
  const auto rounded = [&](double value) {
    return activation == DType::kBF16 ? numeric::bf16_round(static_cast<float>(value)) : static_cast<float>(value);
  };
  std::vector<float> expected(static_cast<size_t>(tokens * kTopK * kHidden));
  for (int64_t slot = 0; slot < tokens * kTopK; ++slot) {
    const int64_t e = ids[static_cast<size_t>(slot)] - first;
    if (e < 0 || e >= local) continue;
    const std::vector<double> row = seen_row(mode, x.data() + slot / kTopK * kHidden, kHidden, 0);
    const std::vector<double> g = w1[static_cast<size_t>(e)].values(), u = w3[static_cast<size_t>(e)].values(),
                              d = w2[static_cast<size_t>(e)].values();
    std::vector<float> h(kInner);
    for (int64_t n = 0; n < kInner; ++n) {
      double gate = 0, up = 0;
      for (int64_t k = 0; k < kHidden; ++k)
        gate += row[static_cast<size_t>(k)] * g[static_cast<size_t>(n * kHidden + k)],
            up += row[static_cast<size_t>(k)] * u[static_cast<size_t>(n * kHidden + k)];
      gate = static_cast<double>(rounded(gate)), up = static_cast<double>(rounded(up));
      if (limit > 0)
        gate = std::min(gate, static_cast<double>(limit)),
        up = std::clamp(up, -static_cast<double>(limit), static_cast<double>(limit));
      h[static_cast<size_t>(n)] =
          rounded(gate / (1 + std::exp(-gate)) * up * static_cast<double>(routing[static_cast<size_t>(slot)]));
    }
    const std::vector<double> seen =
        seen_row(mode, h.data(), kInner,
                 mode == InputMode::kA4 && limit > 0 ? routing[static_cast<size_t>(slot)] * limit * limit / 2688 : 0);
    for (int64_t n = 0; n < kHidden; ++n) {
      double y = 0;
      for (int64_t k = 0; k < kInner; ++k) y += seen[static_cast<size_t>(k)] * d[static_cast<size_t>(n * kInner + k)];
      expected[static_cast<size_t>(slot * kHidden + n)] = static_cast<float>(y);
    }
  }
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    const device::Buffer workspace = testing::workspace_for(variant, desc, std::max<int64_t>(1, tokens));
    std::vector<testing::VariantWeight> packed;
    const auto pack = [&](const std::vector<ops::WeightView>& views) {
      std::vector<ops::WeightView> out;
      for (const ops::WeightView& view : views) {
        packed.push_back(testing::weight_for(variant, desc, view));
        out.push_back(packed.back().view);
      }
      return out;
    };
    const std::vector<ops::WeightView> p1 = pack(v1), p3 = pack(v3), p2 = pack(v2);
    const auto run = [&](int threads, int64_t begin, int64_t count) {
      device::Queue queue(threads);
      testing::PoisonedTensor out(activation, {count, kTopK, kHidden});
      variant.run(desc,
                  {.x = {input.as<char>() + begin * kHidden * dtype_bits(activation) / 8, activation, {count, kHidden}},
                   .experts = ids.data() + begin * kTopK,
                   .routing = routing.data() + begin * kTopK,
                   .w1 = p1.data(),
                   .w3 = p3.data(),
                   .w2 = p2.data(),
                   .out = out.view(),
                   .num_tokens = count,
                   .workspace = workspace.data()},
                  queue);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    const std::vector<float> all = run(1, 0, tokens);
    // A rounding of h that falls the other way moves an output by one step of its format.
    const double bound = mode == InputMode::kF32   ? testing::kF32Bound
                         : mode == InputMode::kA16 ? testing::kBf16Bound
                                                   : 0.03;
    EXPECT_TRUE(testing::is_close(all, expected, bound));
    EXPECT_TRUE(testing::same_bits(run(2, 0, tokens), all)) << "threads";
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_TRUE(testing::same_bits(run(1, t, 1),
                                     std::span(all).subspan(static_cast<size_t>(t * kTopK * kHidden), kTopK * kHidden)))
          << "token " << t << " alone";
    }
  });
}

TEST_F(MoeTest, EveryModeAndFormat) {
  for (const int64_t tokens : {0, 1, 2, 13}) {
    if (testing::kIsSanitized && tokens == 2) continue;
    check(InputMode::kF32, WeightFormat::kNvfp4, tokens, 0, 6, 10);
    check(InputMode::kF32, WeightFormat::kF32, tokens, 0, 6, 0);
    check(InputMode::kA16, WeightFormat::kNvfp4, tokens, 0, 6, 1);
    check(InputMode::kA16, WeightFormat::kBf16, tokens, 0, 6, 10);
    check(InputMode::kA8, WeightFormat::kNvfp4, tokens, 0, 6, 10);
    check(InputMode::kA4, WeightFormat::kNvfp4, tokens, 0, 6, 1);
    check(InputMode::kA4, WeightFormat::kNvfp4, tokens, 0, 6, 0);
  }
}

TEST_F(MoeTest, ForeignExpertsGiveZeros) {
  check(InputMode::kA16, WeightFormat::kNvfp4, 9, 0, 3, 10);
  check(InputMode::kA16, WeightFormat::kNvfp4, 9, 3, 3, 10);
}

TEST(SwiGluValue, ClampsGateAboveAndUpOnBothSides) {
  EXPECT_NEAR(ops::swiglu_value(12, 3, 10), 29.9986381, 1e-5);
  EXPECT_NEAR(ops::swiglu_value(-15, 3, 10), -1.3765600e-05, 1e-10);
  EXPECT_NEAR(ops::swiglu_value(2, -11, 10), -17.6159416, 1e-5);
  EXPECT_NEAR(ops::swiglu_value(2, 11, 10), 17.6159416, 1e-5);
  EXPECT_TRUE(std::isnan(ops::swiglu_value(std::nanf(""), 1, 10)));
  EXPECT_TRUE(std::isnan(ops::swiglu_value(1, std::nanf(""), 10)));
}

}  // namespace
}  // namespace tessera
