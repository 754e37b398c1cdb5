// SPDX-License-Identifier: Apache-2.0
// Hopper's maps and experts at the whole sizes of Flash and Pro: a row's bits are the same among one and among
// thousands, whichever of the kernels their number takes, and those of one are the reference's within its bound. The
// emulated GPU has small ones.
#include <gtest/gtest.h>

#include <set>
#include <span>

#include "backends/sm90/sum_plans.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using backends::sm90::ExpertKernels, backends::sm90::LinearKernels;
using ops::WeightFormat;

constexpr int64_t kMultiprocessors = testing::kGpuIsEmulated ? 3 : 132;
constexpr WeightFormat kFormats[] = {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16};
// What ends a tile, begins one and lies between; the most are the rows that all others are taken from.
constexpr int64_t kCounts[] = {1, 2, 7, 8, 9, 16, 17, 24, 32, 33, 64, 96, 97, 128, 256, 257, 512, 1024, 4096};
constexpr int64_t kEmulatedCounts[] = {1, 2, 9, 40, 70};

std::span<const int64_t> counts() {
  return testing::kGpuIsEmulated ? std::span<const int64_t>(kEmulatedCounts) : kCounts;
}

// Runs rows [first, first + count), `width` values each, by themselves: run(first, count) has the bits that they have
// among the first `most`.
template <class Run>
void expect_same_rows(Rng& rng, int64_t most, int64_t width, const Run& run) {
  const std::vector<float> all = run(0, most);
  for (const int64_t count : counts()) {
    if (count > most) break;
    const auto first = static_cast<int64_t>(rng.below(static_cast<uint64_t>(most - count + 1)));
    EXPECT_TRUE(testing::same_bits(run(first, count), std::span(all).subspan(static_cast<size_t>(first * width),
                                                                             static_cast<size_t>(count * width))))
        << count << " rows from " << first;
  }
}

class HopperWidthsTest : public testing::RandomTest {
 protected:
  // Of `most` rows; notes which kernels their numbers take on an H100 or H200.
  void check_map(const ops::Linear::Desc& desc, int64_t most);
  void check_experts(const ops::MoeExperts::Desc& desc, int64_t most);

  std::set<LinearKernels> map_kernels_;
  std::set<ExpertKernels> expert_kernels_;
};

bool is_hoppers(const char* variant) {
  return std::string(variant) == "wgmma";
}

void HopperWidthsTest::check_map(const ops::Linear::Desc& desc, int64_t most) {
  const int64_t in = desc.groups * desc.in, out = desc.groups * desc.out;
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, out, desc.in);
  const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, most, in), DType::kBF16, {most, in});
  bool is_checked = false;
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    if (!is_hoppers(variant.name)) return;
    is_checked = true;
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const auto run = [&](int64_t first, int64_t count) {
      map_kernels_.insert(backends::sm90::linear_choice(desc, count, kMultiprocessors, false).kernels);
      return testing::run_linear(variant, desc, x, packed.view, first, count, 1);
    };
    expect_same_rows(rng_, most, out, run);
    EXPECT_TRUE(testing::is_close(run(0, 1), testing::run_linear(testing::kScalarLinear, desc, x, weight.view, 0, 1, 2),
                                  testing::kF32Bound));
  });
  EXPECT_TRUE(is_checked) << desc.to_string();
}

void HopperWidthsTest::check_experts(const ops::MoeExperts::Desc& desc, int64_t most) {
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.hidden, desc.inner));
  }
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, most, desc.hidden), DType::kBF16, {most, desc.hidden});
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < most; ++t) {
    std::set<int32_t> chosen;
    while (std::ssize(chosen) < desc.top_k) {
      chosen.insert(static_cast<int32_t>(rng_.below(static_cast<uint64_t>(desc.num_experts))));
    }
    ids.insert(ids.end(), chosen.begin(), chosen.end());
    for (int64_t k = 0; k < desc.top_k; ++k) routing.push_back(rng_.uniform());
  }
  const testing::ExpertRows rows{x, ids, routing};
  std::vector<ops::WeightView> plain[3];
  for (size_t i = 0; i < weights.size(); ++i) plain[i % 3].push_back(weights[i].view);
  const ops::Variant<ops::MoeExperts> scalar{"scalar", nullptr, nullptr, ops::moe_experts_reference_workspace,
                                             ops::moe_experts_reference};
  bool is_checked = false;
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!is_hoppers(variant.name)) return;
    is_checked = true;
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < weights.size(); ++i) {
      packed.push_back(testing::weight_for(variant, desc, weights[i].view));
      views[i % 3].push_back(packed.back().view);
    }
    const auto run = [&](int64_t first, int64_t count) {
      expert_kernels_.insert(backends::sm90::expert_kernels(desc, count, kMultiprocessors));
      return testing::run_experts(variant, desc, rows, views, first, count, 1);
    };
    expect_same_rows(rng_, most, desc.top_k * desc.hidden, run);
    EXPECT_TRUE(
        testing::is_close(run(0, 1), testing::run_experts(scalar, desc, rows, plain, 0, 1, 2), testing::kBf16Bound));
  });
}

class HopperMapsTest : public HopperWidthsTest, public ::testing::WithParamInterface<WeightFormat> {};

TEST_P(HopperMapsTest, OfFlashAndPro) {
  if (!testing::has_backend("sm90")) GTEST_SKIP() << "needs a Hopper GPU";
  struct Map {
    int64_t in, out, groups = 1;
  };
  const std::vector<Map> maps =
      testing::kGpuIsEmulated
          ? std::vector<Map>{{512, 144}, {1024, 16, 2}}
          : std::vector<Map>{{4096, 1024},  {1024, 32768}, {4096, 512},  {4096, 1024, 8}, {8192, 4096},
                             {4096, 2048},  {2048, 4096},  {7168, 1536}, {1536, 65536},   {4096, 1024, 16},
                             {16384, 7168}, {7168, 3072},  {3072, 7168}};
  for (const Map& map : maps) {
    const int64_t width = map.groups * std::max(map.in, map.out);
    check_map({.in = map.in, .out = map.out, .groups = map.groups, .format = GetParam(), .output = DType::kF32},
              std::min(counts().back(), (int64_t{1} << 26) / width));
  }
  if (testing::kGpuIsEmulated) return;
  for (const LinearKernels kernels : {LinearKernels::kWide, LinearKernels::kChunks}) {
    EXPECT_TRUE(map_kernels_.contains(kernels)) << static_cast<int>(kernels);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, HopperMapsTest, ::testing::ValuesIn(kFormats),
                         [](const auto& one) { return "format" + std::to_string(static_cast<int>(one.param)); });

TEST_F(HopperWidthsTest, Experts) {
  if (!testing::has_backend("sm90")) GTEST_SKIP() << "needs a Hopper GPU";
  const auto desc = [](int64_t hidden, int64_t inner, int64_t num_experts, int64_t top_k) {
    return ops::MoeExperts::Desc{.hidden = hidden,
                                 .inner = inner,
                                 .num_local = num_experts,
                                 .num_experts = num_experts,
                                 .top_k = top_k,
                                 .format = WeightFormat::kNvfp4,
                                 .swiglu_limit = 10};
  };
  if (testing::kGpuIsEmulated) return check_experts(desc(512, 512, 6, 2), 40);
  check_experts(desc(4096, 2048, 40, 6), 4096);
  check_experts(desc(7168, 3072, 16, 6), 1024);
  for (const ExpertKernels kernels : {ExpertKernels::kPortable, ExpertKernels::kFew, ExpertKernels::kWide}) {
    EXPECT_TRUE(expert_kernels_.contains(kernels)) << static_cast<int>(kernels);
  }
}

}  // namespace
}  // namespace tessera
