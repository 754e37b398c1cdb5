// SPDX-License-Identifier: Apache-2.0
// docs/contracts/numerics.md, section 7, for long prefills and wide weights: up to 4,096 rows of x and more than 512
// outputs, so that rows and panels fill several of a kernel's largest jobs and leave a tail. A row's bits are those
// that it has in a few rows, whatever the number of threads. Inputs are narrow, so that it takes seconds;
// invariance_test.cc has the real widths.
#include <gtest/gtest.h>

#include <algorithm>

#include "backends/emulated_variants.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::InputMode;
using ops::WeightFormat;

constexpr int64_t kMost = 4096;

class ManyRowsTest : public testing::RandomTest {
 protected:
  void check_linear(const ops::Linear::Desc& desc);
  void check_experts(const ops::MoeExperts::Desc& desc);

  // Numbers of rows around what a job holds, and some that no constant knows; each with where it begins.
  std::vector<std::pair<int64_t, int64_t>> slices() {
    std::vector<std::pair<int64_t, int64_t>> all = {{kMost - 1, 1}};
    for (const int64_t count : {1, 4, 31, 32, 127, 129, 513, 2047, 4095}) {
      const int64_t rows = count + static_cast<int64_t>(rng_.below(2));
      all.emplace_back(rng_.below(static_cast<uint64_t>(kMost - rows + 1)), rows);
    }
    return all;
  }
  int some_threads() { return 1 + static_cast<int>(rng_.below(9)); }
};

std::span<const float> rows_of(const std::vector<float>& all, int64_t first, int64_t count, int64_t width) {
  return std::span(all).subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width));
}

void ManyRowsTest::check_linear(const ops::Linear::Desc& desc) {
  const int64_t x_width = desc.groups * desc.in, y_width = desc.groups * desc.out;
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, y_width, desc.in);
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, kMost, x_width), DType::kBF16, {kMost, x_width});
  constexpr int64_t kCompared = 24;
  const int64_t compared = static_cast<int64_t>(rng_.below(kMost - kCompared + 1));
  const std::vector<float> reference =
      testing::run_linear(testing::kScalarLinear, desc, x, weight.view, compared, kCompared, 2);
  const auto check = [&](const ops::Variant<ops::Linear>& variant) {
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const std::vector<float> all = testing::run_linear(variant, desc, x, packed.view, 0, kMost, 2);
    EXPECT_TRUE(testing::is_close(rows_of(all, compared, kCompared, y_width), reference, testing::kF32Bound))
        << "rows from " << compared;
    for (const auto& [first, count] : slices()) {
      const int threads = some_threads();
      EXPECT_TRUE(testing::same_bits(testing::run_linear(variant, desc, x, packed.view, first, count, threads),
                                     rows_of(all, first, count, y_width)))
          << count << " rows from " << first << ", " << threads << " threads";
    }
  };
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool is_ref) {
    if (!is_ref && !testing::is_emulated(variant)) check(variant);
  });
  std::string why_not;
  if (!device::probe_machine().cpu.avx512 || !testing::kEmulatedLinear.supports(desc, why_not)) return;
  SCOPED_TRACE("emulated tiles, " + desc.to_string());
  check(testing::kEmulatedLinear);
}

// 33 panels are two jobs of 16 and one; the others leave a tail of a panel.
TEST_F(ManyRowsTest, Linear) {
  const auto f32 = [](WeightFormat format, InputMode mode, int64_t in, int64_t out, int64_t groups = 1) {
    return ops::Linear::Desc{
        .in = in, .out = out, .groups = groups, .format = format, .input = mode, .output = DType::kF32};
  };
  check_linear(f32(WeightFormat::kNvfp4, InputMode::kA16, 64, 528));
  check_linear(f32(WeightFormat::kNvfp4, InputMode::kA8, 96, 529 + static_cast<int64_t>(rng_.below(14))));
  check_linear(f32(WeightFormat::kNvfp4, InputMode::kA16, 32, 272, 2));
  check_linear(f32(WeightFormat::kFp8Block, InputMode::kA16, 160, 515));
  check_linear(f32(WeightFormat::kBf16, InputMode::kA16, 64, 1000 + static_cast<int64_t>(rng_.below(40))));
  check_linear(f32(WeightFormat::kF32, InputMode::kA16, 32, 521));
}

void ManyRowsTest::check_experts(const ops::MoeExperts::Desc& desc) {
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.hidden, desc.inner));
  }
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, kMost, desc.hidden), DType::kBF16, {kMost, desc.hidden});
  // Expert 0 gets nearly half of all rows, the last one a few.
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < kMost; ++t) {
    const auto others = static_cast<uint64_t>(t % 100 == 17 ? desc.num_local - 1 : desc.num_local - 2);
    ids.insert(ids.end(), {0, 1 + static_cast<int32_t>(rng_.below(others))});
    routing.insert(routing.end(), {rng_.uniform(), rng_.uniform()});
  }
  const int64_t width = desc.top_k * desc.hidden;
  const auto check = [&](const ops::Variant<ops::MoeExperts>& variant) {
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < weights.size(); ++i) {
      packed.push_back(testing::weight_for(variant, desc, weights[i].view));
      views[i % 3].push_back(packed.back().view);
    }
    const auto run = [&](int64_t first, int64_t count, int threads) {
      return testing::run_experts(variant, desc, {x, ids, routing}, views, first, count, threads);
    };
    const std::vector<float> all = run(0, kMost, 2);
    for (const auto& [first, count] : slices()) {
      const int threads = some_threads();
      EXPECT_TRUE(testing::same_bits(run(first, count, threads), rows_of(all, first, count, width)))
          << count << " tokens from " << first << ", " << threads << " threads";
    }
  };
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool is_ref) {
    if (!is_ref && !testing::is_emulated(variant)) check(variant);
  });
  std::string why_not;
  if (!device::probe_machine().cpu.avx512 || !testing::kEmulatedMoe.supports(desc, why_not)) return;
  SCOPED_TRACE("emulated tiles, " + desc.to_string());
  check(testing::kEmulatedMoe);
}

TEST_F(ManyRowsTest, Experts) {
  const auto desc = [](InputMode mode, int64_t hidden, int64_t inner) {
    return ops::MoeExperts::Desc{.hidden = hidden,
                                 .inner = inner,
                                 .num_local = 6,
                                 .top_k = 2,
                                 .format = WeightFormat::kNvfp4,
                                 .input = mode,
                                 .swiglu_limit = 10};
  };
  check_experts(desc(InputMode::kA16, 528 + 16, 32));
  check_experts(desc(InputMode::kA8, 32, 528 + 16));
}

}  // namespace
}  // namespace tessera
