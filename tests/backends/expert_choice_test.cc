// SPDX-License-Identifier: Apache-2.0
// Tiles and kernels of experts are chosen by what a rank computes of them: cut by id it has a share of the slots, cut
// by width a part of every expert.
#include <gtest/gtest.h>

#include <array>

#include "backends/sm100/sums_plan.h"
#include "backends/sm120/sum_plans.h"
#include "backends/sm90/sum_plans.h"

namespace tessera {
namespace {

constexpr int64_t kMultiprocessors = 132;

// Flash's experts.
constexpr ops::MoeExperts::Desc kWhole{.hidden = 4096, .inner = 2048, .num_local = 256, .num_experts = 256, .top_k = 6};

ops::MoeExperts::Desc by_id(int64_t world) {
  ops::MoeExperts::Desc desc = kWhole;
  desc.first_expert = desc.num_local /= world;
  return desc;
}

ops::MoeExperts::Desc by_width(int64_t world) {
  ops::MoeExperts::Desc desc = kWhole;
  desc.inner /= world;
  return desc;
}

// As many slots come to an expert whoever has it.
TEST(ExpertChoice, TilesOfSlotsDoNotDependOnTheCut) {
  for (int64_t tokens = 1; tokens <= 8192; tokens += 1 + tokens / 8) {
    for (const int64_t world : {2, 4, 8}) {
      for (const ops::MoeExperts::Desc& desc : {by_id(world), by_width(world)}) {
        EXPECT_EQ(backends::sm100::expert_tile_slots(desc, tokens), backends::sm100::expert_tile_slots(kWhole, tokens));
        EXPECT_EQ(backends::sm120::expert_tile_slots(desc, tokens), backends::sm120::expert_tile_slots(kWhole, tokens));
      }
    }
  }
}

TEST(ExpertChoice, HopperCountsARanksOwnSlotsAndRows) {
  using backends::sm90::ExpertKernels;
  const auto chosen = [](const ops::MoeExperts::Desc& desc, int64_t tokens) {
    return backends::sm90::expert_kernels(desc, tokens, kMultiprocessors);
  };
  // Fewer than eight slots to an expert: tiles of eight, on any number of ranks.
  EXPECT_EQ(chosen(kWhole, 128), ExpertKernels::kFew);
  EXPECT_EQ(chosen(kWhole, 256), ExpertKernels::kFew);
  for (const int64_t world : {2, 4, 8}) {
    EXPECT_EQ(chosen(by_id(world), 128), ExpertKernels::kFew) << world;
    EXPECT_EQ(chosen(by_width(world), 128), ExpertKernels::kFew) << world;
    EXPECT_EQ(chosen(by_id(world), 256), ExpertKernels::kFew) << world;
    EXPECT_EQ(chosen(by_id(world), 342), ExpertKernels::kWide) << world;
    EXPECT_EQ(chosen(by_width(world), 342), ExpertKernels::kWide) << world;
  }
  // Too few tiles for the GPU, whichever way the others went; of one token however many.
  EXPECT_EQ(chosen(kWhole, 2), ExpertKernels::kFew);
  for (const int64_t world : {2, 4}) {
    EXPECT_EQ(chosen(by_id(world), 2 * world), ExpertKernels::kFew) << world;
    EXPECT_EQ(chosen(by_width(world), 2 * world), ExpertKernels::kFew) << world;
    EXPECT_EQ(chosen(by_id(world), world), ExpertKernels::kPortable) << world;
    EXPECT_EQ(chosen(by_width(world), world), ExpertKernels::kPortable) << world;
  }
  ops::MoeExperts::Desc pro = kWhole;
  pro.inner = 3072, pro.hidden = 7168, pro.num_local = pro.num_experts = 384;
  EXPECT_EQ(chosen(pro, 1), ExpertKernels::kPortable);
  EXPECT_EQ(chosen(pro, 2), ExpertKernels::kFew);
  // Two launches for rounded inputs, which want twice as many tiles.
  ops::MoeExperts::Desc rounded = kWhole;
  for (const ops::InputMode input : {ops::InputMode::kA8, ops::InputMode::kA4}) {
    rounded.input = input;
    EXPECT_EQ(chosen(rounded, 2), ExpertKernels::kPortable);
    EXPECT_EQ(chosen(rounded, 3), ExpertKernels::kFew);
  }
}

// Pro's over eight ranks have 384.
TEST(ExpertChoice, HopperTakesWidthsOf128Channels) {
  ops::MoeExperts::Desc desc = kWhole;
  for (const int64_t inner : {128, 256, 384, 640}) {
    desc.inner = inner;
    EXPECT_EQ(backends::sm90::expert_kernels(desc, 4096, kMultiprocessors), backends::sm90::ExpertKernels::kWide);
    EXPECT_EQ(backends::sm90::padded_inner(desc) % 512, 0);
    EXPECT_LT(backends::sm90::padded_inner(desc) - inner, 512);
  }
  desc.inner = 64;
  EXPECT_EQ(backends::sm90::expert_kernels(desc, 4096, kMultiprocessors), backends::sm90::ExpertKernels::kPortable);
}

// The portable kernel takes 45 to 56 us for 32 tokens of wo_a in FP8, tiles of many 16 to 21 in NVFP4.
TEST(MapChoice, HopperTakesTilesOfManyForOutputGroupsInFp8) {
  const auto chosen = [](ops::WeightFormat format, int64_t tokens) {
    const ops::Linear::Desc wo_a{.in = 4096, .out = 1024, .groups = 8, .format = format};
    return backends::sm90::linear_choice(wo_a, tokens, kMultiprocessors, false).kernels;
  };
  for (const int64_t tokens : {20, 32}) {
    EXPECT_EQ(chosen(ops::WeightFormat::kFp8Block, tokens), backends::sm90::LinearKernels::kWide) << tokens;
  }
}

// Those of a layer's input do, of Flash and of Pro; wq_b keeps its ring where an indexer's is BF16.
TEST(MapChoice, HopperStreamsTwoFormatsWhereNoRingLosesMuch) {
  const auto streams = [](ops::WeightFormat format, int64_t in, int64_t out, int64_t tokens) {
    const std::array<ops::Linear::Desc, 2> maps{
        {{.in = in, .out = out, .format = format}, {.in = in, .out = 65536, .format = ops::WeightFormat::kBf16}}};
    return backends::sm90::streams_formats(maps, tokens, kMultiprocessors);
  };
  constexpr auto kFp8 = ops::WeightFormat::kFp8Block, kNvfp4 = ops::WeightFormat::kNvfp4;
  for (const auto format : {kFp8, kNvfp4}) {
    for (const int64_t tokens : {1, 8}) {
      EXPECT_TRUE(streams(format, 4096, 1024 + 512, tokens)) << tokens;
      EXPECT_TRUE(streams(format, 7168, 1536 + 512, tokens)) << tokens;
    }
    EXPECT_FALSE(streams(format, 4096, 1024 + 512, 9));
    EXPECT_FALSE(streams(format, 1024, 16384, 1));
    EXPECT_FALSE(streams(format, 16384, 1536 + 512, 1));  // 31 units to a multiprocessor
  }
  EXPECT_FALSE(streams(kFp8, 1024, 16384, 8));
  EXPECT_TRUE(streams(kNvfp4, 1024, 16384, 8));  // of more tokens than one it has none
}

}  // namespace
}  // namespace tessera
