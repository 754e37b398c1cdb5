// SPDX-License-Identifier: Apache-2.0
// Hopper's all_experts, the shared expert in the launches of the routed ones (sm90/ring_experts.cu), gives the bits of
// the portable backend's ops one after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "backends/sm90/sum_plans.h"
#include "ops/all_experts/all_experts.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

using ops::WeightFormat;

using Outputs = std::map<std::string, std::vector<float>>;  // by variant

constexpr int64_t kMultiprocessors = testing::kGpuIsEmulated ? 3 : 132;
// So many experts on all ranks that this one expects too little work for few_sums.cuh, which would have it otherwise on
// a GPU as small as the emulated one.
constexpr int64_t kManyExperts = 1 << 20;

class AllExpertsRingTest : public testing::RandomTest {
 protected:
  // What a shared expert of FP8 has: scales that all fold, or those of one of its matrices do not.
  enum class Folding { kAll, kNotAll };
  void check_all_experts(const ops::AllExperts::Desc& desc, int64_t num_tokens, int64_t num_experts, bool has_nans,
                         Folding folding);
};

void expect_same(Outputs outputs) {
  if (!testing::has_backend("sm90")) return;
  // Every NaN as one: which of their bits a sum keeps, no contract says.
  for (auto& [name, values] : outputs) {
    for (float& value : values) {
      if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    }
  }
  ASSERT_TRUE(outputs.contains("wgmma"));
  EXPECT_TRUE(testing::same_bits(outputs.at("wgmma"), outputs.at("packed")));
}

// The shared expert beside the routed ones, as wide as they.
ops::AllExperts::Desc with_shared(const ops::MoeExperts::Desc& routed, float limit,
                                  WeightFormat format = WeightFormat::kNvfp4) {
  const ops::Linear::Desc gate{.in = routed.hidden, .out = routed.inner, .format = format};
  return {.routed = routed,
          .gated = {.maps = {gate, gate}, .swiglu = ops::SwiGlu::Desc{.inner = routed.inner, .limit = limit}},
          .down = {.in = routed.inner, .out = routed.hidden, .format = format}};
}

// Beside the portable backend's ops one after the other. Some tokens choose an expert twice; with NaN scales (NVFP4)
// the shared expert has a row of NaN in w3, hence nothing else, or one in w2.
void AllExpertsRingTest::check_all_experts(const ops::AllExperts::Desc& desc, int64_t num_tokens, int64_t num_experts,
                                           bool has_nans, Folding folding) {
  SCOPED_TRACE(std::to_string(num_tokens) + " tokens of " + desc.to_string());
  const ops::MoeExperts::Desc& routed = desc.routed;
  std::vector<testing::RandomWeight> weights;  // w1, w3 and w2 of each routed expert, then of the shared one
  for (int64_t e = 0; e <= routed.num_local; ++e) {
    const WeightFormat format = e < routed.num_local ? WeightFormat::kNvfp4 : desc.down.format;
    weights.push_back(testing::random_weight(rng_, format, routed.inner, routed.hidden));
    weights.push_back(testing::random_weight(rng_, format, routed.inner, routed.hidden));
    weights.push_back(testing::random_weight(rng_, format, routed.hidden, routed.inner));
  }
  if (desc.down.format == WeightFormat::kFp8Block) {
    const uint64_t other = folding == Folding::kAll ? 3 : rng_.below(3);
    for (uint64_t i = 0; i < 3; ++i) {
      testing::set_fp8_scales(weights[weights.size() - 3 + i], rng_, i != other);
    }
  }
  if (has_nans) {
    const testing::RandomWeight& weight = weights[weights.size() - 1 - rng_.below(2)];
    weight.scales.as<uint8_t>()[rng_.below(static_cast<uint64_t>(routed.inner * routed.hidden / 16))] = 0x7F;
  }
  const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, num_tokens, routed.hidden), DType::kBF16,
                                              {num_tokens, routed.hidden});
  std::vector<int32_t> ids;
  std::vector<float> routing;
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::multiset<int32_t> chosen;
    const bool may_repeat = rng_.below(4) == 0;
    while (std::ssize(chosen) < routed.top_k) {
      const auto expert = static_cast<int32_t>(rng_.below(static_cast<uint64_t>(num_experts)));
      if (may_repeat || !chosen.contains(expert)) chosen.insert(expert);
    }
    ids.insert(ids.end(), chosen.begin(), chosen.end());
    for (int64_t k = 0; k < routed.top_k; ++k) routing.push_back(rng_.below(8) == 0 ? 0 : rng_.uniform());
  }
  struct Packed {
    std::vector<testing::VariantWeight> weights;
    std::vector<ops::WeightView> views[3];  // the shared expert's are the last
  };
  const size_t all = weights.size(), first_shared = all - 3;
  const auto packed_for = [&](const auto& variant, const auto& of, size_t begin, size_t end) {
    Packed packed;
    for (size_t i = begin; i < end; ++i) {
      packed.weights.push_back(testing::weight_for(variant, of, weights[i].view));
      packed.views[i % 3].push_back(packed.weights.back().view);
    }
    return packed;
  };
  const auto append = [](std::vector<float>& to, const std::vector<float>& values) {
    to.insert(to.end(), values.begin(), values.end());
  };
  Outputs outputs;  // of the routed experts, then of the shared one
  testing::PoisonedTensor gate(DType::kBF16, {num_tokens, routed.inner}), up(DType::kBF16, {num_tokens, routed.inner});
  const auto gated_args = [&](const Packed& packed) {
    ops::LinearGroup::Args args;
    args.x = x.view(), args.y = {gate.view(), up.view()}, args.num_tokens = num_tokens;
    args.weights = {packed.views[0].back(), packed.views[1].back()};
    return args;
  };
  device::Queue queue(1);
  testing::for_each_variant<ops::MoeExperts>(routed, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!testing::is_on_gpu(variant) || std::string(variant.name) != "packed") return;
    const Packed packed = packed_for(variant, routed, 0, first_shared);
    append(outputs["packed"], testing::run_experts(variant, routed, {x, ids, routing}, packed.views, 0, num_tokens, 1));
  });
  testing::for_each_variant<ops::LinearGroup>(desc.gated, [&](const ops::Variant<ops::LinearGroup>& variant, bool) {
    if (!testing::is_on_gpu(variant) || std::string(variant.name) != "packed") return;
    const Packed packed = packed_for(variant, desc.gated, first_shared, all);
    variant.run(desc.gated, gated_args(packed), queue);
  });
  testing::for_each_variant<ops::Linear>(desc.down, [&](const ops::Variant<ops::Linear>& variant, bool) {
    if (!testing::is_on_gpu(variant) || std::string(variant.name) != "packed") return;
    const Packed packed = packed_for(variant, desc.down, first_shared, all);
    const device::Tensor h = testing::as_tensor(gate.floats(), DType::kBF16, {num_tokens, routed.inner});
    append(outputs["packed"], testing::run_linear(variant, desc.down, h, packed.views[2].back(), 0, num_tokens, 1));
  });
  testing::for_each_variant<ops::AllExperts>(desc, [&](const ops::Variant<ops::AllExperts>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    const Packed packed = packed_for(variant, desc, 0, all);
    const bool all_fold = std::ranges::all_of(packed.views, [](const auto& views) { return views.back().scales_fold; });
    EXPECT_EQ(all_fold, desc.down.format == WeightFormat::kFp8Block && folding == Folding::kAll);
    testing::PoisonedTensor out(DType::kBF16, {num_tokens, routed.top_k, routed.hidden}),
        shared(DType::kBF16, {num_tokens, routed.hidden});
    ops::AllExperts::Args args;
    args.routed.x = x.view(), args.routed.experts = ids.data(), args.routed.routing = routing.data();
    args.routed.w1 = packed.views[0].data(), args.routed.w3 = packed.views[1].data();
    args.routed.w2 = packed.views[2].data(), args.routed.out = out.view();
    gate = testing::PoisonedTensor(DType::kBF16, {num_tokens, routed.inner});
    args.gated = gated_args(packed);
    args.down.x = gate.view(), args.down.weight = packed.views[2].back(), args.down.y = shared.view();
    args.num_tokens = num_tokens;
    variant.run(desc, args, queue);
    EXPECT_TRUE(out.is_guard_intact() && shared.is_guard_intact() && gate.is_guard_intact() && up.is_guard_intact());
    append(outputs[variant.name], out.floats());
    append(outputs[variant.name], shared.floats());
  });
  expect_same(outputs);
}

// In the launches of the routed experts, from one slot to as many as kernels list themselves.
TEST_F(AllExpertsRingTest, Experts) {
  const auto check = [&](int64_t hidden, int64_t inner, int64_t first, int64_t local, int64_t top_k, int64_t tokens,
                         int64_t num_experts, bool has_nans = false, WeightFormat shared = WeightFormat::kNvfp4) {
    const ops::MoeExperts::Desc routed{.hidden = hidden,
                                       .inner = inner,
                                       .first_expert = first,
                                       .num_local = local,
                                       .num_experts = kManyExperts,
                                       .top_k = top_k,
                                       .format = WeightFormat::kNvfp4,
                                       .swiglu_limit = 10};
    const ops::AllExperts::Desc desc = with_shared(routed, rng_.below(2) == 0 ? 0.5f : 10, shared);
    EXPECT_TRUE(backends::sm90::uses_ring(desc, true, tokens, kMultiprocessors));
    check_all_experts(desc, tokens, num_experts, has_nans, Folding::kAll);
    if (shared == WeightFormat::kFp8Block && (hidden == 512 || inner == 1024)) {  // no ring; in some shapes
      check_all_experts(desc, tokens, num_experts, has_nans, Folding::kNotAll);
    }
  };
  constexpr WeightFormat kFp8 = WeightFormat::kFp8Block;
  if (!testing::kGpuIsEmulated) {
    for (const int64_t tokens : {1, 2}) check(4096, 2048, 0, 16, 6, tokens, 16);
    check(7168, 3072, 4, 8, 8, 1, 16);
    for (const int64_t inner : {2048, 1024}) {
      for (int64_t tokens : {1, 1, 2}) check(4096, inner, 0, 16, 6, tokens, 16, false, kFp8);
    }
    for (const int64_t inner : {384, 768}) check(7168, inner, 0, 16, 8, 1, 16, false, kFp8);
    check(7168, 384, 0, 16, 8, 2, 16, false, kFp8);
    return;
  }
  check(1024, 512, 0, 8, 6, 1, 8);
  check(512, 1024, 2, 5, 6, 1, 12);    // ranks before and after
  check(1024, 1024, 12, 1, 1, 1, 13);  // hardly ever a slot of this rank
  if (!testing::kIsSanitized) {
    check(512, 1536, 0, 4, 3, 1, 4);
    check(1536, 512, 0, 4, 3, 1, 4);
    check(512, 512, 0, 4, 3, 1, 4, true);
  }
  check(512, 1024, 0, 6, 4, 2, 6);
  check(512, 512, 0, 6, 4, 3, 6, true);
  // FP8's units of a block take two places each. Of one token the ring has 44 stages: 44 places of gate and up, 64
  // twice, and 44 of the last two. Of three it has 40: 32 places, then 64, the most that uses_ring() lets pass.
  check(512, 512, 0, 6, 4, 1, 6, false, kFp8);
  check(1024, 384, 0, 6, 4, 1, 6, false, kFp8);
  check(512, 768, 0, 6, 4, 1, 6, false, kFp8);
  check(512, 384, 0, 6, 4, 3, 6, false, kFp8);
  check(1024, 384, 0, 6, 4, 3, 6, false, kFp8);
  check(512, 512, 2, 8, 6, 1, 12, false, kFp8);
  check(512, 512, 12, 1, 2, 1, 13, false, kFp8);
  check(2048, 512, 0, 3, 2, 1, 3);  // the shared expert's units are more than the ring has stages; several rounds
}

TEST_F(AllExpertsRingTest, Choice) {
  constexpr int64_t kGpu = 132;
  const ops::MoeExperts::Desc flash{.hidden = 4096, .inner = 2048, .num_local = 256, .top_k = 6};
  const auto uses_ring = [](const ops::MoeExperts::Desc& routed, int64_t tokens,
                            WeightFormat shared = WeightFormat::kNvfp4, bool folds = false) {
    return backends::sm90::uses_ring(with_shared(routed, 10, shared), folds, tokens, kGpu);
  };
  EXPECT_TRUE(uses_ring(flash, 1));
  EXPECT_FALSE(uses_ring(flash, 2));  // few_experts
  ops::MoeExperts::Desc half = flash;
  half.inner = 1024;  // a rank's of two
  EXPECT_TRUE(uses_ring(half, 2));
  EXPECT_FALSE(uses_ring(half, 3));
  const ops::MoeExperts::Desc pro{.hidden = 7168, .inner = 3072, .num_local = 384, .top_k = 8};
  EXPECT_TRUE(uses_ring(pro, 1));
  for (const ops::MoeExperts::Desc& routed : {flash, half}) {
    EXPECT_TRUE(uses_ring(routed, 1, WeightFormat::kFp8Block, true));
    EXPECT_FALSE(uses_ring(routed, 1, WeightFormat::kFp8Block, false));
  }
  EXPECT_FALSE(uses_ring(pro, 1, WeightFormat::kFp8Block, true));  // too many units of a block
  ops::MoeExperts::Desc eighth = pro;
  eighth.inner = 384;  // a rank's of eight
  for (const WeightFormat shared : {WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    EXPECT_TRUE(uses_ring(eighth, 1, shared, true));
  }
  // Whoever has packed weights, the shared expert's all NVFP4 or all FP8, has the fused op, with any number of tokens.
  const auto supports = [&](const ops::AllExperts::Desc& desc) {
    bool found = false;
    testing::for_each_variant<ops::AllExperts>(
        desc, [&](const ops::Variant<ops::AllExperts>& variant, bool) { found |= testing::is_on_gpu(variant); });
    return found;
  };
  if (!testing::has_backend("sm90")) return;
  ops::AllExperts::Desc desc = with_shared(flash, 10);
  EXPECT_TRUE(supports(desc));
  desc.down.in = desc.gated.maps[0].out = desc.gated.maps[1].out = desc.gated.swiglu->inner = 1024;
  EXPECT_FALSE(supports(desc));  // another width
  EXPECT_TRUE(supports(with_shared(flash, 10, WeightFormat::kFp8Block)));
  EXPECT_FALSE(supports(with_shared(flash, 10, WeightFormat::kBf16)));
  desc = with_shared(flash, 10);
  desc.down.format = WeightFormat::kFp8Block;
  EXPECT_FALSE(supports(desc));
  desc = with_shared(flash, 10);
  desc.routed.input = ops::InputMode::kA4;
  EXPECT_FALSE(supports(desc));
}

}  // namespace
}  // namespace tessera
