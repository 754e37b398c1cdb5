// SPDX-License-Identifier: Apache-2.0
// Hopper's kernels with packed weights, for few tokens to an expert and for many, give the portable backend's bits at
// numbers of tokens, rows and experts that fill tiles, leave tails and leave experts without a token.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "backends/sm90/sum_plans.h"
#include "ops/linear/linear.h"
#include "ops/linear_group/linear_group.h"
#include "ops/moe/moe.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

using ops::WeightFormat;

using Outputs = std::map<std::string, std::vector<float>>;  // by variant

class HopperSumsTest : public testing::RandomTest {
 protected:
  void check_linear(const ops::Linear::Desc& desc, int64_t num_tokens);
  void check_linear(const ops::Linear::Desc& desc, const testing::RandomWeight& weight, const std::vector<float>& x);
  void check_linear_of_nans(WeightFormat format, int64_t num_tokens, int64_t out = 144);
  enum class Folding { kAny, kAll };
  void check_group(const ops::LinearGroup::Desc& desc, int64_t num_tokens, Folding folding = Folding::kAny);
  void check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts, bool has_nans = false);
};

constexpr WeightFormat kFormats[] = {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16};
constexpr int64_t kMultiprocessors = testing::kGpuIsEmulated ? 3 : 132;

void expect_same(const Outputs& outputs) {
  std::string why_not;
  const auto gpu = testing::find_test_gpu(why_not);
  if (!gpu.has_value() || gpu->compute_major != 9) return;
  ASSERT_TRUE(outputs.contains("wgmma"));
  EXPECT_TRUE(testing::same_bits_or_nan(outputs.at("wgmma"), outputs.at("packed")));
}

// FP8 with scales that fold, and with others.
void HopperSumsTest::check_linear(const ops::Linear::Desc& desc, int64_t num_tokens) {
  testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.groups * desc.out, desc.in);
  const bool is_fp8 = desc.format == WeightFormat::kFp8Block;
  for (int fold = 0; fold <= (is_fp8 ? 1 : 0); ++fold) {
    if (is_fp8) testing::set_fp8_scales(weight, rng_, fold == 1);
    check_linear(desc, weight, testing::adversarial(rng_, num_tokens, desc.groups * desc.in));
  }
}

void HopperSumsTest::check_linear(const ops::Linear::Desc& desc, const testing::RandomWeight& weight,
                                  const std::vector<float>& values) {
  const int64_t width = desc.groups * desc.in, num_tokens = std::ssize(values) / width;
  SCOPED_TRACE(std::to_string(num_tokens) + " tokens");
  const device::Tensor x = testing::as_tensor(values, DType::kBF16, {num_tokens, width});
  Outputs outputs;
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    if (std::string(variant.name) != "wgmma" && std::string(variant.name) != "packed") return;
    outputs[variant.name] = testing::run_linear(variant, desc, x, packed.view, 0, num_tokens, 1);
  });
  expect_same(outputs);
}

// Tiles have at most 128 tokens, of FP8 whose scales do not fold 96.
TEST_F(HopperSumsTest, Linear) {
  const auto some = [&](int64_t from, int64_t below) {
    return from + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(below)));
  };
  for (const WeightFormat format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(format)));
    for (const DType output : {DType::kBF16, DType::kF32}) {
      const auto desc = [&](int64_t in, int64_t out, int64_t groups) {
        return ops::Linear::Desc{.in = in, .out = out, .groups = groups, .format = format, .output = output};
      };
      check_linear(desc(512, 16, 1), some(25, 8));
      check_linear(desc(1024, 128, 1), some(33, 32));
      check_linear(desc(512, 144, 2), some(65, 64));
      if (format == WeightFormat::kFp8Block) check_linear(desc(512, 272, 1), some(96, 2));
      check_linear(desc(512, 272, 1), some(128, 2));
    }
    if (testing::kGpuIsEmulated) continue;
    check_linear({.in = 4096, .out = 2048, .format = format}, some(500, 600));
    check_linear({.in = 2048, .out = 4096 + 16, .groups = 3, .format = format}, some(200, 600));
  }
}

// What streams, goes by tiles of the whole width and by chunks, at numbers of tokens that leave a tail of each tile.
// The emulated GPU is slow: it takes the last for one of the formats, by chance.
TEST_F(HopperSumsTest, LinearOfEachKind) {
  using backends::sm90::LinearKernels;
  struct Case {
    LinearKernels kernels;
    int64_t in, out, tokens;
  };
  const std::vector<Case> cases = testing::kGpuIsEmulated ? std::vector<Case>{{LinearKernels::kPortable, 512, 48, 21},
                                                                              {LinearKernels::kWide, 512, 336, 70},
                                                                              {LinearKernels::kChunks, 4096, 112, 50}}
                                                          : std::vector<Case>{{LinearKernels::kPortable, 4096, 272, 21},
                                                                              {LinearKernels::kWide, 1024, 32784, 70},
                                                                              {LinearKernels::kChunks, 4096, 4112, 50},
                                                                              {LinearKernels::kChunks, 8192, 4096, 32}};
  const uint64_t chosen = rng_.below(std::size(kFormats));
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(kFormats[i])));
    for (const Case& one : cases) {
      if (testing::kGpuIsEmulated && one.kernels == LinearKernels::kChunks && i != chosen) continue;
      SCOPED_TRACE("out " + std::to_string(one.out));
      const ops::Linear::Desc desc{.in = one.in,
                                   .out = one.out,
                                   .format = kFormats[i],
                                   .output = rng_.below(2) == 0 ? DType::kBF16 : DType::kF32};
      EXPECT_EQ(backends::sm90::linear_choice(desc, one.tokens, kMultiprocessors, false).kernels, one.kernels);
      check_linear(desc, one.tokens);
    }
  }
}

// The same of maps of one input in one launch: each map as it is alone, gate and up as their activation.
TEST_F(HopperSumsTest, Group) {
  using backends::sm90::LinearKernels;
  const int64_t first = testing::kGpuIsEmulated ? 80 : 4112, last = testing::kGpuIsEmulated ? 144 : 4096;
  const int64_t tokens = 61 + static_cast<int64_t>(rng_.below(4));
  const uint64_t chosen = rng_.below(std::size(kFormats));
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (testing::kGpuIsEmulated && i != chosen) continue;
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(kFormats[i])));
    const auto map = [&](int64_t out, DType output) {
      return ops::Linear::Desc{.in = 1536, .out = out, .format = kFormats[i], .output = output};
    };
    const ops::LinearGroup::Desc maps{{map(first, DType::kF32), map(16, DType::kBF16), map(last, DType::kF32)}};
    const ops::LinearGroup::Desc gated{{map(first, DType::kBF16), map(first, DType::kBF16)},
                                       ops::SwiGlu::Desc{.inner = first, .limit = 0.5f}};
    for (const ops::LinearGroup::Desc& desc : {maps, gated}) {
      EXPECT_EQ(backends::sm90::group_choice(desc.maps, tokens, kMultiprocessors, false, false).kernels,
                LinearKernels::kChunks);
      // A launch has weights of one kind.
      EXPECT_NE(backends::sm90::group_choice(desc.maps, tokens, kMultiprocessors, false, true).kernels,
                LinearKernels::kChunks);
      check_group(desc, tokens);
      check_group(desc, 9 + static_cast<int64_t>(rng_.below(8)));  // streams
    }
  }
}

// Of so many tokens that maps run one by one, and share their arranged input where their tiles have as many tokens: on
// a GPU, between two maps of the same tiles, one of smaller tiles, for which it is arranged anew, and one for the
// portable kernels. The emulated GPU is too small for tiles of different numbers of tokens.
TEST_F(HopperSumsTest, GroupOfManyTokens) {
  using backends::sm90::LinearKernels;
  const bool is_emulated = testing::kGpuIsEmulated;
  const int64_t first = is_emulated ? 400 : 4112, second = is_emulated ? 320 : 1360, third = is_emulated ? 16 : 144;
  const int64_t tokens = 257 + static_cast<int64_t>(rng_.below(40));
  const uint64_t chosen = rng_.below(std::size(kFormats));
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (is_emulated && i != chosen) continue;
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(kFormats[i])));
    const auto map = [&](int64_t out, DType output) {
      return ops::Linear::Desc{.in = 1024, .out = out, .format = kFormats[i], .output = output};
    };
    const ops::LinearGroup::Desc maps{{map(first, DType::kBF16), map(first, DType::kF32), map(second, DType::kBF16),
                                       map(third, DType::kBF16), map(first, DType::kBF16)}};
    const ops::LinearGroup::Desc gated{{map(first, DType::kBF16), map(first, DType::kBF16)},
                                       ops::SwiGlu::Desc{.inner = first, .limit = 0.5f}};
    const auto choice_of = [&](size_t m) {
      return backends::sm90::linear_choice(maps.maps[m], tokens, kMultiprocessors, false);
    };
    for (const size_t m : {0, 1, 2, 4}) EXPECT_EQ(choice_of(m).kernels, LinearKernels::kWide);
    if (!is_emulated) EXPECT_NE(choice_of(2).tile_tokens, choice_of(0).tile_tokens);
    EXPECT_EQ(choice_of(3).kernels, LinearKernels::kPortable);
    for (const ops::LinearGroup::Desc& desc : {maps, gated}) {
      EXPECT_EQ(backends::sm90::group_choice(desc.maps, tokens, kMultiprocessors, false, false).kernels,
                LinearKernels::kWide);
      check_group(desc, tokens);
    }
  }
}

void HopperSumsTest::check_group(const ops::LinearGroup::Desc& desc, int64_t num_tokens, Folding folding) {
  SCOPED_TRACE(std::to_string(num_tokens) + " tokens");
  const ops::Linear::Desc& first = desc.maps.front();
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, num_tokens, first.in), DType::kBF16, {num_tokens, first.in});
  std::vector<testing::RandomWeight> weights;
  const uint64_t folded = folding == Folding::kAll ? 1 : rng_.below(3);  // of FP8's: none, all, some
  for (const ops::Linear::Desc& map : desc.maps) {
    weights.push_back(testing::random_weight(rng_, map.format, map.out, map.in));
    if (map.format != WeightFormat::kFp8Block) continue;
    testing::set_fp8_scales(weights.back(), rng_, folded == 1 || (folded == 2 && weights.size() % 2 == 0));
  }
  Outputs outputs;  // of all maps
  testing::for_each_variant<ops::LinearGroup>(desc, [&](const ops::Variant<ops::LinearGroup>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    ops::LinearGroup::Args args;
    args.x = x.view(), args.num_tokens = num_tokens;
    std::vector<testing::VariantWeight> packed;
    std::vector<testing::PoisonedTensor> y;
    for (size_t i = 0; i < desc.maps.size(); ++i) {
      packed.push_back(testing::weight_for(variant, desc, weights[i].view));
      y.emplace_back(desc.maps[i].output, Shape{num_tokens, desc.maps[i].out});
      args.weights[i] = packed[i].view, args.y[i] = y[i].view();
    }
    const device::Buffer workspace = testing::workspace_for(variant, desc, num_tokens);
    args.workspace = workspace.data();
    device::Queue queue(1);
    variant.run(desc, args, queue);
    std::vector<float>& all = outputs[variant.name];
    for (size_t i = 0; i < (desc.swiglu ? 1 : desc.maps.size()); ++i) {
      const std::vector<float> values = y[i].floats();
      all.insert(all.end(), values.begin(), values.end());
    }
  });
  expect_same(outputs);
}

// Codes of NaN and infinities among weights and inputs come out as the portable backend's, row by row.
void HopperSumsTest::check_linear_of_nans(WeightFormat format, int64_t num_tokens, int64_t out) {
  constexpr int64_t kIn = 1024;
  const testing::RandomWeight weight = testing::random_weight(rng_, format, out, kIn);
  for (int i = 0; i < 5; ++i) {
    const auto at = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(out * kIn)));
    auto* const bytes = weight.data.as<uint8_t>();
    if (format == WeightFormat::kNvfp4) weight.scales.as<uint8_t>()[at / 16] = i % 2 == 0 ? 0x7F : 0xFF;
    if (format == WeightFormat::kFp8Block) bytes[at] = i % 2 == 0 ? 0x7F : 0xFF;
    if (format == WeightFormat::kBf16) weight.data.as<uint16_t>()[at] = i % 2 == 0 ? 0x7FC0 : 0xFF80;
  }
  std::vector<float> values = testing::adversarial(rng_, num_tokens, kIn);
  values[static_cast<size_t>(num_tokens / 13 * kIn + 5)] = std::numeric_limits<float>::infinity();
  values[static_cast<size_t>((num_tokens - 1) * kIn + 700)] =
      num_tokens == 1 ? -1.0f : std::numeric_limits<float>::quiet_NaN();
  check_linear({.in = kIn, .out = out, .format = format, .output = DType::kF32}, weight, values);
}

TEST_F(HopperSumsTest, LinearOfNans) {
  for (const WeightFormat format : kFormats) {
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(format)));
    check_linear_of_nans(format, 40);
  }
}

// With NaN scales expert 0 has two rows of NaN in w2 and expert 2 one in w3, hence nothing else: as the kernel of
// plain loops has it.
void HopperSumsTest::check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts,
                                   bool has_nans) {
  SCOPED_TRACE(std::to_string(num_tokens) + " tokens");
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.inner, desc.hidden));
    weights.push_back(testing::random_weight(rng_, desc.format, desc.hidden, desc.inner));
  }
  if (has_nans) {
    const auto put = [&](size_t weight, uint64_t row, int64_t width) {
      const auto blocks = static_cast<uint64_t>(width / 16);
      weights[weight].scales.as<uint8_t>()[row * blocks + rng_.below(blocks)] = row % 2 == 0 ? 0x7F : 0xFF;
    };
    const uint64_t row = rng_.below(static_cast<uint64_t>(desc.hidden - 24));
    put(2, row, desc.inner), put(2, row + 9, desc.inner);
    put(3 * 2 + 1, rng_.below(static_cast<uint64_t>(desc.inner)), desc.hidden);
  }
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, num_tokens, desc.hidden), DType::kBF16, {num_tokens, desc.hidden});
  // The first of the experts and others, but for the second: that one has no token.
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::set<int32_t> chosen{0};
    while (std::ssize(chosen) < desc.top_k) {
      chosen.insert(2 + static_cast<int32_t>(rng_.below(static_cast<uint64_t>(num_experts - 2))));
    }
    ids.insert(ids.end(), chosen.begin(), chosen.end());
    for (int64_t k = 0; k < desc.top_k; ++k) routing.push_back(rng_.uniform());
  }
  Outputs outputs;
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    const std::string name = variant.name;
    if (name != "wgmma" && name != "packed" && !(has_nans && name == "simple")) return;
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < weights.size(); ++i) {
      packed.push_back(testing::weight_for(variant, desc, weights[i].view));
      views[i % 3].push_back(packed.back().view);
    }
    outputs[name] = testing::run_experts(variant, desc, {x, ids, routing}, views, 0, num_tokens, 1);
  });
  expect_same(outputs);
  if (!has_nans || outputs.empty()) return;
  ASSERT_TRUE(outputs.contains("simple"));
  const std::vector<float>& found = outputs.at("packed");
  const auto is_nan = [](float value) { return std::isnan(value); };
  EXPECT_TRUE(std::equal(found.begin(), found.end(), outputs.at("simple").begin(),
                         [&](float one, float other) { return is_nan(one) == is_nan(other); }));
  EXPECT_TRUE(std::any_of(found.begin(), found.end(), is_nan));
  EXPECT_FALSE(std::all_of(found.begin(), found.end(), is_nan));
}

TEST_F(HopperSumsTest, Experts) {
  const auto desc = [](int64_t hidden, int64_t inner, int64_t first, int64_t local) {
    return ops::MoeExperts::Desc{.hidden = hidden,
                                 .inner = inner,
                                 .first_expert = first,
                                 .num_local = local,
                                 .top_k = 2,
                                 .format = WeightFormat::kNvfp4,
                                 .swiglu_limit = 10};
  };
  // A case takes seconds under a sanitizer: each is run there every other time.
  const auto check = [&](const auto&... args) {
    if (!testing::kIsSanitized || rng_.below(2) == 0) check_experts(args...);
  };
  check(desc(512, 512, 0, 4), 37 + static_cast<int64_t>(rng_.below(4)), 4);
  check(desc(512, 1024, 0, 12), 9 + static_cast<int64_t>(rng_.below(20)), 12);  // few to an expert
  check(desc(1024, 512, 3, 9), 20 + static_cast<int64_t>(rng_.below(9)), 14);
  check(desc(512, 512, 2, 3), 131 + static_cast<int64_t>(rng_.below(9)), 6);  // ranks before and after
  check(desc(512, 512, 0, 4), 37 + static_cast<int64_t>(rng_.below(4)), 4, true);
  check(desc(512, 512, 0, 12), 9 + static_cast<int64_t>(rng_.below(20)), 12, true);
  // Parts of a unit's columns: many slots to an expert, and few.
  check(desc(512, 128, 0, 4), 37 + static_cast<int64_t>(rng_.below(4)), 4);
  check(desc(512, 384, 2, 9), 30 + static_cast<int64_t>(rng_.below(20)), 12);
  check(desc(512, 640, 0, 12), 20 + static_cast<int64_t>(rng_.below(9)), 12);
  // Slots of several segments, most of them other ranks'.
  check(desc(512, 512, 100, 19), 1060 + static_cast<int64_t>(rng_.below(600)), 400);
  // Inputs and h rounded, each where it lies; without the clamp h's scale follows from its largest value.
  for (const ops::InputMode mode : {ops::InputMode::kA8, ops::InputMode::kA4}) {
    SCOPED_TRACE(ops::to_string(mode));
    const auto rounded = [&](int64_t inner, int64_t first, int64_t local, float limit) {
      ops::MoeExperts::Desc one = desc(512, inner, first, local);
      one.input = mode, one.swiglu_limit = limit;
      return one;
    };
    check(rounded(512, 1, 4, 10), 37 + static_cast<int64_t>(rng_.below(4)), 6);
    check(rounded(512, 0, 4, 0), 37 + static_cast<int64_t>(rng_.below(4)), 4);
    check(rounded(384, 0, 9, 10), 30 + static_cast<int64_t>(rng_.below(20)), 9);
    check(rounded(1024, 0, 12, rng_.below(2) == 0 ? 10 : 0), 9 + static_cast<int64_t>(rng_.below(20)), 12);
  }
  if (testing::kGpuIsEmulated) return;
  check_experts(desc(2048, 1024, 0, 64), 1500 + static_cast<int64_t>(rng_.below(600)), 64);
  check_experts(desc(4096, 2048, 0, 256), 4 + static_cast<int64_t>(rng_.below(100)), 256);
  check_experts(desc(4096, 2048, 8, 16), 700 + static_cast<int64_t>(rng_.below(300)), 40);
}

// One ring of units for a multiprocessor (unit_ring.cuh): maps of one token, experts of up to eight.
class HopperRingTest : public HopperSumsTest {
 protected:
  // So many experts on all ranks that this one expects too little work for few_sums.cuh, which would have it otherwise
  // on a GPU as small as the emulated one.
  static constexpr int64_t kManyExperts = 1 << 20;
  // Rows of maps of `in` columns that are `more` tiles of 16 more than it takes to have the ring.
  static int64_t rows(int64_t in, int64_t maps, int64_t more, WeightFormat format = WeightFormat::kNvfp4) {
    const int64_t units = kMultiprocessors * (format == WeightFormat::kFp8Block ? backends::sm90::kFewestFp8RingUnits
                                                                                : backends::sm90::kFewestRingUnits);
    return (ceil_div<int64_t>(units, maps * ceil_div<int64_t>(in, 512)) + more) * 16;
  }
};

TEST_F(HopperRingTest, Choice) {
  constexpr int64_t kGpu = 132;  // multiprocessors
  const auto uses_ring = [](int64_t in, int64_t out, int64_t num_tokens = 1, WeightFormat format = WeightFormat::kNvfp4,
                            bool folds = false) {
    const ops::Linear::Desc map{.in = in, .out = out, .format = format};
    return backends::sm90::uses_ring({&map, 1}, 1, folds, num_tokens, kGpu);
  };
  EXPECT_TRUE(uses_ring(8192, 4096));
  EXPECT_TRUE(uses_ring(8192, 132 * 16));  // a unit for each warp
  EXPECT_FALSE(uses_ring(8192, 131 * 16));
  EXPECT_FALSE(uses_ring(8192, 4096, 2));
  EXPECT_FALSE(uses_ring(8192 + 128, 4096));
  EXPECT_FALSE(uses_ring(8192, 4096 + 8));
  EXPECT_TRUE(uses_ring(8192, 672, 1, WeightFormat::kFp8Block, true));
  EXPECT_FALSE(uses_ring(8192, 656, 1, WeightFormat::kFp8Block, true));
  EXPECT_TRUE(uses_ring(8192, 4096, 8, WeightFormat::kFp8Block, true));
  EXPECT_FALSE(uses_ring(8192, 4096, 9, WeightFormat::kFp8Block, true));
  EXPECT_FALSE(uses_ring(8192, 4096, 1, WeightFormat::kFp8Block));
  EXPECT_FALSE(uses_ring(8192, 4096, 1, WeightFormat::kBf16));
  EXPECT_TRUE(uses_ring(65536, 4096));  // all that a round has room for
  EXPECT_FALSE(uses_ring(65536 + 512, 4096));
  ops::MoeExperts::Desc experts{.hidden = 4096, .inner = 2048, .num_local = 64, .top_k = 6};
  EXPECT_TRUE(backends::sm90::uses_ring(experts, 1, kGpu));
  EXPECT_TRUE(backends::sm90::uses_ring(experts, 5, kGpu));
  EXPECT_FALSE(backends::sm90::uses_ring(experts, 6, kGpu));  // more slots than kernels list themselves
  experts.inner = 1920;
  EXPECT_TRUE(backends::sm90::uses_ring(experts, 1, kGpu));
  experts.inner = 1936;
  EXPECT_FALSE(backends::sm90::uses_ring(experts, 1, kGpu));
  // Of Pro, a rank's of eight.
  EXPECT_TRUE(backends::sm90::uses_ring({.hidden = 7168, .inner = 384, .num_local = 384, .top_k = 8}, 1, kGpu));
  experts.hidden = experts.inner = 512;
  EXPECT_FALSE(backends::sm90::uses_ring(experts, 1, kGpu));  // too little work
}

// Blocks have one tile or more than one, more units than the ring has stages and more than a round has sums for; none
// of their numbers is the same for all blocks.
TEST_F(HopperRingTest, Linear) {
  const auto check = [&](int64_t in, int64_t groups, int64_t more, DType output) {
    for (const WeightFormat format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block}) {
      const ops::Linear::Desc desc{
          .in = in, .out = rows(in, groups, more, format), .groups = groups, .format = format, .output = output};
      EXPECT_TRUE(backends::sm90::uses_ring({&desc, 1}, 1, true, 1, kMultiprocessors));
      check_linear(desc, 1);
      if (format != WeightFormat::kFp8Block || in / 512 > backends::sm90::RingPlan<8>::kRoundUnits) continue;
      const int64_t tokens = 2 + static_cast<int64_t>(rng_.below(7));
      EXPECT_TRUE(backends::sm90::uses_ring({&desc, 1}, 1, true, tokens, kMultiprocessors));
      check_linear(desc, tokens);
    }
  };
  for (const DType output : {DType::kBF16, DType::kF32}) {
    check(512, 1, 5, output);
    check(1536, 3, 0, output);
    check(4096, 2, 1, output);
    check(8192, 1, 0, output);
    check(1024, 1, testing::kGpuIsEmulated ? 40 : 2000, output);  // several rounds of stages
  }
  check(512, 1, testing::kGpuIsEmulated ? 400 : 17000, DType::kBF16);
  check(8192, 1, testing::kGpuIsEmulated ? 25 : 1198, DType::kF32);
  check(65536, 1, 2, DType::kF32);
  check_linear_of_nans(WeightFormat::kNvfp4, 1, rows(1024, 1, 1));
}

TEST_F(HopperRingTest, Group) {
  for (const WeightFormat format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block}) {
    const auto map = [&](int64_t in, int64_t out, DType output) {
      return ops::Linear::Desc{.in = in, .out = out, .format = format, .output = output};
    };
    for (const int64_t in : {512, 2048, 7168}) {
      SCOPED_TRACE("in " + std::to_string(in));
      const int64_t all = rows(in, 1, 1, format), half = rows(in, 2, 1, format);
      const ops::LinearGroup::Desc maps{
          {map(in, all, DType::kF32), map(in, 16, DType::kBF16), map(in, 144, DType::kF32)}};
      const ops::LinearGroup::Desc gated{{map(in, half, DType::kBF16), map(in, half, DType::kBF16)},
                                         ops::SwiGlu::Desc{.inner = half, .limit = 0.5f}};
      for (const ops::LinearGroup::Desc& desc : {maps, gated}) {
        EXPECT_TRUE(backends::sm90::uses_ring(desc, true, 1, kMultiprocessors));
        check_group(desc, 1, Folding::kAll);
        if (format != WeightFormat::kFp8Block) continue;
        check_group(desc, 1);
        check_group(desc, 2 + static_cast<int64_t>(rng_.below(7)), Folding::kAll);
      }
    }
  }
}

// From one slot to as many as kernels list themselves; with experts of other ranks, without a token and of NaN scales.
TEST_F(HopperRingTest, Experts) {
  const auto check = [&](int64_t hidden, int64_t inner, int64_t first, int64_t local, int64_t top_k, int64_t tokens,
                         int64_t num_experts, ops::InputMode mode = ops::InputMode::kA16, bool has_nans = false) {
    const ops::MoeExperts::Desc desc{.hidden = hidden,
                                     .inner = inner,
                                     .first_expert = first,
                                     .num_local = local,
                                     .num_experts = kManyExperts,
                                     .top_k = top_k,
                                     .format = WeightFormat::kNvfp4,
                                     .input = mode,
                                     .swiglu_limit = 10};
    EXPECT_TRUE(backends::sm90::uses_ring(desc, tokens, kMultiprocessors));
    EXPECT_EQ(backends::sm90::expert_kernels(desc, tokens, kMultiprocessors), backends::sm90::ExpertKernels::kPortable);
    check_experts(desc, tokens, num_experts, has_nans);
  };
  if (!testing::kGpuIsEmulated) {
    for (const int64_t tokens : {1, 2, 5}) check(4096, 2048, 0, 16, 6, tokens, 16);
    for (const int64_t tokens : {1, 4}) check(7168, 3072, 4, 8, 8, tokens, 16);
    for (const int64_t inner : {384, 768}) check(7168, inner, 0, 16, 8, 1, 16);
    return;
  }
  const auto some_tokens = [&] { return 2 + static_cast<int64_t>(rng_.below(7)); };
  check(1024, 1024, 0, 4, 1, 1, 4);
  check(1024, 512, 0, 8, 6, 1, 8);
  check(512, 1024, 2, 5, 6, 1, 12);  // ranks before and after
  check(1024, 1024, 1, 3, 1, 1, 4);  // perhaps no slot of this rank
  check(512, 1024, 0, 6, 4, 8, 6);
  check(1024, 512, 3, 4, 4, some_tokens(), 12);
  for (const int64_t short_by : {128, 256, 384}) check(512, 1024 - short_by, 0, 4, 3, 1, 4);
  check(1024, 512 + 128, 0, 6, 4, 2, 6);
  check(512, 512, 0, 4, 3, 1, 4, ops::InputMode::kA16, true);
  check(512, 512, 0, 4, 3, 8, 4, ops::InputMode::kA16, true);
  check(512, 512, 1, 4, 3, 1, 6, ops::InputMode::kA4);
  check(512, 512, 0, 4, 2, some_tokens(), 4, ops::InputMode::kA8);
  check(2048, 512, 0, 3, 2, 1, 3);  // several rounds
}

// What routings are drawn for: experts of one size, of which this rank has some.
struct RoutedShape {
  int64_t hidden, inner, num_experts, first, num_local, most_tokens;
};

// Random routings: from all tokens choosing alike to all choosing evenly, of whom this rank has some experts; inputs in
// every mode. TESSERA_ROUTINGS says how many (docs/performance/hopper.md: how many have run on a GPU).
TEST_F(HopperSumsTest, Routings) {
  const char* wanted = std::getenv("TESSERA_ROUTINGS");
  const int num_routings = wanted != nullptr ? std::atoi(wanted) : testing::kGpuIsEmulated ? 4 : 200;
  constexpr int64_t kTopK = 6, kDifferent = 36;  // matrices: experts beyond have the same ones again
  // All kernels; few slots, which are the ring's; more slots of few than one block lists. An emulated GPU has the
  // first.
  const std::vector<RoutedShape> shapes = {
      {512, 512, 16, 2, 12, 150}, {1024, 1024, 16, 2, 12, 5}, {512, 512, 256, 8, 240, 300}};
  const ops::InputMode modes[] = {ops::InputMode::kA16, ops::InputMode::kA8, ops::InputMode::kA4};
  struct Data {
    std::vector<testing::RandomWeight> weights;
    device::Tensor x;
  };
  std::vector<Data> data_of(testing::kGpuIsEmulated ? 1 : shapes.size());
  for (size_t s = 0; s < data_of.size(); ++s) {
    const RoutedShape& shape = shapes[s];
    for (int64_t i = 0; i < kDifferent; ++i) {
      const bool is_down = i % 3 == 2;
      data_of[s].weights.push_back(testing::random_weight(
          rng_, WeightFormat::kNvfp4, is_down ? shape.hidden : shape.inner, is_down ? shape.inner : shape.hidden));
    }
    data_of[s].x = testing::as_tensor(testing::adversarial(rng_, shape.most_tokens, shape.hidden), DType::kBF16,
                                      {shape.most_tokens, shape.hidden});
  }
  struct Packed {
    std::vector<testing::VariantWeight> weights;
    std::vector<ops::WeightView> views[3];
  };
  std::map<std::string, Packed> packed_of;  // by variant, shape and mode
  std::set<backends::sm90::ExpertKernels> seen;
  int num_rings = 0, num_listed = 0;
  for (int i = 0; i < num_routings && !HasFailure(); ++i) {
    const size_t s = testing::kGpuIsEmulated ? 0 : i % 4 == 1 ? 1 : i % 16 == 2 ? 2 : 0;
    const RoutedShape& shape = shapes[s];
    const ops::MoeExperts::Desc desc{.hidden = shape.hidden,
                                     .inner = shape.inner,
                                     .first_expert = shape.first,
                                     .num_local = shape.num_local,
                                     .top_k = kTopK,
                                     .format = WeightFormat::kNvfp4,
                                     .input = modes[rng_.below(3)],
                                     .swiglu_limit = 10};
    const int64_t most = std::min<int64_t>(shape.most_tokens, testing::kGpuIsEmulated ? 20
                                                              : s == 0 && i % 8 != 0  ? 30
                                                                                      : 300);
    const int64_t num_tokens = 1 + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(most)));
    SCOPED_TRACE("routing " + std::to_string(i) + ", " + desc.to_string() + ", " + std::to_string(num_tokens) +
                 " tokens");
    const auto num_experts = static_cast<uint64_t>(shape.num_experts);
    std::vector<int32_t> order(num_experts);
    std::iota(order.begin(), order.end(), 0);
    for (size_t e = order.size(); e > 1; --e) std::swap(order[e - 1], order[rng_.below(e)]);
    const uint64_t popular = kTopK + rng_.below(num_experts - kTopK + 1);  // experts that are chosen at all
    std::vector<int32_t> ids;
    std::vector<float> routing;
    for (int64_t t = 0; t < num_tokens; ++t) {
      std::vector<int32_t> chosen(order.begin(), order.begin() + static_cast<int64_t>(popular));
      for (size_t k = 0; k < kTopK; ++k) std::swap(chosen[k], chosen[k + rng_.below(popular - k)]);
      std::sort(chosen.begin(), chosen.begin() + kTopK);
      ids.insert(ids.end(), chosen.begin(), chosen.begin() + kTopK);
      for (int64_t k = 0; k < kTopK; ++k) routing.push_back(rng_.below(20) == 0 ? 0 : rng_.uniform());
    }
    const backends::sm90::ExpertKernels kernels = backends::sm90::expert_kernels(desc, num_tokens, kMultiprocessors);
    seen.insert(kernels);
    if (backends::sm90::uses_ring(desc, num_tokens, kMultiprocessors)) ++num_rings;
    if (kernels == backends::sm90::ExpertKernels::kFew && num_tokens * kTopK > backends::sm90::kMostFewSlots) {
      ++num_listed;
    }
    Outputs outputs;
    testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
      const std::string name = variant.name;
      if (!testing::is_on_gpu(variant) || (name != "wgmma" && name != "packed")) return;
      Packed& packed = packed_of[name + std::to_string(s) + std::to_string(static_cast<int>(desc.input))];
      const Data& data = data_of[s];
      for (size_t w = packed.weights.size(); w < data.weights.size(); ++w) {
        packed.weights.push_back(testing::weight_for(variant, desc, data.weights[w].view));
        packed.views[w % 3].push_back(packed.weights.back().view);
      }
      for (std::vector<ops::WeightView>& views : packed.views) {
        while (std::ssize(views) < desc.num_local) views.push_back(views[views.size() - kDifferent / 3]);
      }
      outputs[name] = testing::run_experts(variant, desc, {data.x, ids, routing}, packed.views, 0, num_tokens, 1);
    });
    expect_same(outputs);
  }
  if (num_routings < 200) return;
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_GT(num_rings, 0);
  EXPECT_GT(num_listed, 0);
}

}  // namespace
}  // namespace tessera
