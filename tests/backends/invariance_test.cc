// SPDX-License-Identifier: Apache-2.0
// docs/contracts/numerics.md, section 7: at the real widths of Flash and Pro (fewer outputs and experts, so that it
// takes seconds) a row's result is the same bits for any number of rows, at any position, with any thread count; and it
// is what the reference computes. Every variant of every backend that this machine can run.
#include <gtest/gtest.h>

#include <span>

#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::InputMode;
using ops::WeightFormat;

constexpr int64_t kMost = 300, kEmulatedMost = 11;
constexpr int64_t kCounts[] = {1, 2, 3, 5, 7, 8, 9, 64, 65, 256, kMost}, kEmulatedCounts[] = {1, 3, 9};

class LinearInvarianceTest : public testing::RandomTest {
 protected:
  void check(WeightFormat format, InputMode mode, int64_t in, int64_t out, int64_t groups);
};

void LinearInvarianceTest::check(WeightFormat format, InputMode mode, int64_t in, int64_t out, int64_t groups) {
  const ops::Linear::Desc desc{
      .in = in, .out = out, .groups = groups, .format = format, .input = mode, .output = DType::kF32};
  const int64_t x_width = groups * in, y_width = groups * out;
  const testing::RandomWeight weight = testing::random_weight(rng_, format, y_width, in);
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, kMost, x_width), DType::kBF16, {kMost, x_width});
  const auto run = [&](const ops::Variant<ops::Linear>& variant, const ops::WeightView& view, int64_t first,
                       int64_t count,
                       int threads) { return testing::run_linear(variant, desc, x, view, first, count, threads); };
  constexpr int64_t kCompared = 6;
  const std::vector<float> reference = run(testing::kScalarLinear, weight.view, 0, kCompared, 2);
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool is_ref) {
    if (is_ref) return;  // what the others are held against; its own invariance: tests/ops
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const bool is_emulated = testing::is_emulated(variant);
    const int64_t most = is_emulated ? kEmulatedMost : kMost;
    const std::vector<float> all = run(variant, packed.view, 0, most, 2);
    EXPECT_TRUE(testing::is_close(std::span(all).first(static_cast<size_t>(kCompared * y_width)), reference,
                                  testing::kF32Bound));
    for (const int64_t count : is_emulated ? std::span<const int64_t>(kEmulatedCounts) : kCounts) {
      const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(most - count + 1)));
      const int threads = 1 + static_cast<int>(rng_.below(5));
      EXPECT_TRUE(testing::same_bits(
          run(variant, packed.view, first, count, threads),
          std::span(all).subspan(static_cast<size_t>(first * y_width), static_cast<size_t>(count * y_width))))
          << count << " rows from " << first << ", " << threads << " threads";
    }
  });
}

class SlowLinearWidthsTest : public LinearInvarianceTest {};

TEST_F(SlowLinearWidthsTest, OfFlashAndPro) {
  for (const int64_t in : {1024, 1536, 4096, 7168}) check(WeightFormat::kNvfp4, InputMode::kA16, in, 80, 1);
  check(WeightFormat::kNvfp4, InputMode::kA16, 16384, 33, 1);
  check(WeightFormat::kNvfp4, InputMode::kA8, 4096, 48, 1);
  check(WeightFormat::kNvfp4, InputMode::kA4, 7168, 48, 1);
  check(WeightFormat::kNvfp4, InputMode::kA16, 4096, 16, 3);
  check(WeightFormat::kNvfp4, InputMode::kA8, 1024, 16, 3);
  check(WeightFormat::kNvfp4, InputMode::kA4, 1024, 32, 2);
  check(WeightFormat::kNvfp4, InputMode::kA4, 512, 160, 1);
  check(WeightFormat::kFp8Block, InputMode::kA16, 8192, 144, 1);
  check(WeightFormat::kFp8Block, InputMode::kA8, 4096, 40, 1);
  check(WeightFormat::kBf16, InputMode::kA16, 4096, 72, 1);
  check(WeightFormat::kBf16, InputMode::kA16, 7168, 17, 1);
  check(WeightFormat::kF32, InputMode::kA16, 4096, 24, 1);
}

class MoeInvarianceTest : public testing::RandomTest {
 protected:
  static constexpr int64_t kExperts = 5;
  // A rank has experts [first_expert, first_expert + num_local).
  void check(InputMode mode, int64_t hidden, int64_t inner, bool is_skewed, int64_t first_expert = 0,
             int64_t num_local = kExperts);
};

void MoeInvarianceTest::check(InputMode mode, int64_t hidden, int64_t inner, bool is_skewed, int64_t first_expert,
                              int64_t num_local) {
  constexpr int64_t kTopK = 2;
  const ops::MoeExperts::Desc desc{.hidden = hidden,
                                   .inner = inner,
                                   .first_expert = first_expert,
                                   .num_local = num_local,
                                   .top_k = kTopK,
                                   .format = WeightFormat::kNvfp4,
                                   .input = mode,
                                   .swiglu_limit = 10};
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < num_local; ++e) {
    weights.push_back(testing::random_weight(rng_, WeightFormat::kNvfp4, inner, hidden));
    weights.push_back(testing::random_weight(rng_, WeightFormat::kNvfp4, inner, hidden));
    weights.push_back(testing::random_weight(rng_, WeightFormat::kNvfp4, hidden, inner));
  }
  const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, kMost, hidden), DType::kBF16, {kMost, hidden});
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < kMost; ++t) {
    // Skewed: nearly all tokens choose experts 0 and 1.
    const int32_t first = is_skewed && t % 50 != 0 ? 0 : static_cast<int32_t>(rng_.below(kExperts - 1));
    const int32_t second =
        is_skewed && t % 50 != 0
            ? 1
            : first + 1 + static_cast<int32_t>(rng_.below(static_cast<uint64_t>(kExperts - 1 - first)));
    ids.insert(ids.end(), {first, second});
    routing.insert(routing.end(), {rng_.uniform(), rng_.uniform()});
  }
  const auto run = [&](const ops::Variant<ops::MoeExperts>& variant, const std::vector<ops::WeightView>* views,
                       int64_t first, int64_t count, int threads) {
    return testing::run_experts(variant, desc, {x, ids, routing}, views, first, count, threads);
  };
  constexpr int64_t kCompared = 4;
  std::vector<float> reference;
  std::vector<ops::WeightView> plain[3];
  for (size_t i = 0; i < weights.size(); ++i) plain[i % 3].push_back(weights[i].view);
  const ops::Variant<ops::MoeExperts> scalar{"scalar", nullptr, nullptr, ops::moe_experts_reference_workspace,
                                             ops::moe_experts_reference};
  reference = run(scalar, plain, 0, kCompared, 2);
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool is_ref) {
    if (is_ref) return;
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < weights.size(); ++i) {
      packed.push_back(testing::weight_for(variant, desc, weights[i].view));
      views[i % 3].push_back(packed.back().view);
    }
    const bool is_emulated = testing::is_emulated(variant);
    // More where it costs little: then there are more slots than are called few.
    const int64_t most_emulated = hidden * inner <= 1 << 16 ? 2 * kEmulatedMost : kEmulatedMost;
    const int64_t most = is_emulated ? most_emulated : kMost;
    const std::vector<float> all = run(variant, views, 0, most, 2);
    // A rounding of h that falls the other way moves an output by one step of its format.
    EXPECT_TRUE(testing::is_close(std::span(all).first(reference.size()), reference,
                                  mode == InputMode::kA16 ? testing::kBf16Bound : 0.03));
    const int64_t width = kTopK * hidden;
    for (const int64_t count : is_emulated ? std::span<const int64_t>(kEmulatedCounts) : kCounts) {
      const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(most - count + 1)));
      const int threads = 1 + static_cast<int>(rng_.below(5));
      EXPECT_TRUE(testing::same_bits(
          run(variant, views, first, count, threads),
          std::span(all).subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width))))
          << count << " tokens from " << first << ", " << threads << " threads";
    }
  });
}

class SlowMoeWidthsTest : public MoeInvarianceTest {};

TEST_F(SlowMoeWidthsTest, OfFlashAndPro) {
  check(InputMode::kA16, 4096, 64, false);
  check(InputMode::kA16, 64, 2048, true);
  check(InputMode::kA16, 7168, 32, true);
  check(InputMode::kA8, 1024, 96, false);
  check(InputMode::kA4, 96, 3072, true);
}

// Widths that tensor cores take: slots of few tokens are grouped otherwise than those of many, and other ranks' are
// zero.
TEST_F(MoeInvarianceTest, SlotsOfARank) {
  check(InputMode::kA16, 512, 128, true, 1, 3);
  check(InputMode::kA16, 128, 256, false);
  check(InputMode::kA8, 256, 128, true, 1, 3);
  check(InputMode::kA4, 128, 256, false, 0, 4);
}

}  // namespace
}  // namespace tessera
