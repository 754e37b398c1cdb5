// SPDX-License-Identifier: Apache-2.0
#include "model/parallel_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "bench/shapes/published.h"
#include "checkpoint/checkpoint.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "model/rank_memory.h"
#include "model/weight_source.h"

namespace tessera::model {
namespace {

using ops::WeightFormat;
using ::testing::HasSubstr;

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";

std::string refusal_of(const Config& config, int64_t world) {
  try {
    parallel_plans(config, world);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const StoredModel& stored(const char* name, WeightFormat dense = WeightFormat::kFp8Block) {
  static std::map<std::pair<std::string, WeightFormat>, StoredModel> models;
  const auto [at, is_new] = models.try_emplace({name, dense});
  if (is_new) at->second = published_model(bench::published_config(name), dense);
  return at->second;
}

uint64_t bytes_of(const RankMemory& memory, const std::string& kind, bool is_whole = false) {
  for (const HeldWeights& held : memory.weights) {
    if (held.kind == kind) return is_whole ? held.of : held.bytes;
  }
  ADD_FAILURE() << "no " << kind;
  return 0;
}

TEST(ParallelPlan, WrittenOnesComeFirstAndDivideTheModel) {
  for (const auto& [name, world] : {std::pair{"flash", 2}, {"flash", 8}, {"pro", 8}, {"pro", 3}}) {
    const Config& config = stored(name).config;
    const std::vector<ParallelPlan> plans = parallel_plans(config, world);
    EXPECT_TRUE(std::is_partitioned(plans.begin(), plans.end(), [](const auto& plan) { return plan.is_written(); }));
    EXPECT_TRUE(plans[0].is_written());
    for (const ParallelPlan& plan : plans) {
      EXPECT_EQ(plan.world, world);
      // Every slice of the table, the last rank's too, can be cut.
      for (const WeightRow& row : stored(name).rows) {
        if (row.expert > 0) continue;
        EXPECT_NO_THROW(slice_of(row, config, plan.shard(world - 1))) << plan.name();
      }
    }
  }
  EXPECT_EQ(parallel_plans(stored("pro").config, 8)[0].name(), "heads, experts by width");
  // 16 groups can't be cut in three, so no heads, and nothing that needs them.
  const std::vector<ParallelPlan> three = parallel_plans(stored("pro").config, 3);
  for (const ParallelPlan& plan : three) EXPECT_EQ(plan.attention, AttentionSplit::kWhole);
  EXPECT_EQ(three.size(), 4u);  // each with whole caches and with sharded ones
  const std::vector<ParallelPlan> one = parallel_plans(stored("flash").config, 1);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0], ParallelPlan{});
}

TEST(ParallelPlan, WhatCannotBeCutIsNamed) {
  EXPECT_EQ(
      refusal_of(stored("flash").config, 7),
      "256 experts of 2048 channels can't be cut over 7 ranks: neither by id nor by width in runs of 128; nor can "
      "64 heads in 8 output groups");
  EXPECT_THAT(refusal_of(stored("flash").config, 0), HasSubstr("expected 1 or more, found 0"));
}

// Bytes of the published checkpoints with routed experts in NVFP4, embedding and head in BF16; draft blocks left out.
TEST(RankMemory, WeightsAreThoseOfTheCheckpoints) {
  const auto whole = [](const char* name, WeightFormat dense) {
    return static_cast<double>(rank_memory(stored(name, dense), {}, {}, 4096).weight_bytes());
  };
  EXPECT_NEAR(whole("flash", WeightFormat::kFp8Block) / 164.8e9, 1, 5e-3);
  EXPECT_NEAR(whole("pro", WeightFormat::kFp8Block) / 899.5e9, 1, 5e-3);
  EXPECT_LT(whole("flash", WeightFormat::kNvfp4), whole("flash", WeightFormat::kFp8Block) - 2e9);
}

TEST(RankMemory, RanksShareWhatIsCutAndNothingElse) {
  const ops::Precision precision;
  const RankMemory one = rank_memory(stored("flash"), {}, precision, 4096);
  for (const HeldWeights& held : one.weights) EXPECT_EQ(held.bytes, held.of) << held.kind;
  for (const int64_t world : {2, 4, 8}) {
    for (const ParallelPlan& plan : parallel_plans(stored("flash").config, world)) {
      const RankMemory memory = rank_memory(stored("flash"), plan, precision, 4096);
      const auto w = static_cast<uint64_t>(world);
      EXPECT_EQ(bytes_of(memory, "routed experts") * w, bytes_of(one, "routed experts")) << plan.name();
      const uint64_t shared = bytes_of(one, "shared experts"), heads = bytes_of(one, "queries and outputs of heads");
      EXPECT_EQ(bytes_of(memory, "shared experts"), plan.experts == ExpertSplit::kByWidth ? shared / w : shared);
      EXPECT_EQ(bytes_of(memory, "queries and outputs of heads"),
                plan.attention == AttentionSplit::kByGroup ? heads / w : heads);
      EXPECT_EQ(bytes_of(memory, "head") * w, bytes_of(one, "head"));
      EXPECT_EQ(bytes_of(memory, "embedding"), bytes_of(one, "embedding"));
      EXPECT_EQ(bytes_of(memory, "maps of the input") < bytes_of(one, "maps of the input"), plan.cuts_projections);
      EXPECT_EQ(memory.token < one.token, plan.shards_entries);
      EXPECT_EQ(memory.sequence, one.sequence);
    }
  }
}

// One source for caches and work space: what loading a model checks.
TEST(RankMemory, CachesAndWorkAreThoseOfTheFitCheck) {
  const Config& config = stored("pro").config;
  const ops::Precision precision;
  const RankMemory memory = rank_memory(stored("pro"), {}, precision, 64);
  EXPECT_EQ(memory.step, Model::step_bytes(config, precision, 64));
  const ParallelPlan eight = parallel_plans(config, 8).front();
  EXPECT_EQ(rank_memory(stored("pro"), eight, precision, 64).step, Model::step_bytes(config, precision, 64, 8));
  const int64_t slots = config.sliding_window + 63;
  for (const int64_t tokens : {0, 256, 1 << 20}) {
    EXPECT_EQ(rank_sequence_bytes(config, {}, precision, tokens, 64), sequence_bytes(config, precision, tokens, slots));
    EXPECT_NEAR(static_cast<double>(memory.sequence) + memory.token * tokens,
                static_cast<double>(sequence_bytes(config, precision, tokens, slots)), 1);
  }
}

// Of logits of a cut head, a rank's own and all ranks': where a step is short they are more than what layers take, of a
// long one never.
TEST(RankMemory, GatheredLogitsTakeNoMoreThanLayersInLongSteps) {
  const Config& config = stored("pro").config;
  const auto more = [&](int64_t tokens, int64_t world) {
    return Model::step_bytes(config, {}, tokens, world) - Model::step_bytes(config, {}, tokens);
  };
  EXPECT_GT(more(64, 8), 0u);
  EXPECT_LE(more(64, 8), static_cast<size_t>(64 * config.vocab_size * 4 * 9 / 8));
  EXPECT_EQ(more(4096, 8), 0u);
  EXPECT_EQ(more(63, 3), 0u);  // does not divide the vocabulary
}

// What a rank of the bundled model says it holds is what it reads.
TEST(RankMemory, HoldsWhatARankLoads) {
  const Config config = load_config(kTiny);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(kTiny);
  const StoredModel model = checkpoint_model(kTiny, config);
  for (const int64_t world : {1, 2}) {
    for (const ParallelPlan& plan : parallel_plans(config, world)) {
      if (!plan.is_written()) continue;
      const WeightSource source(checkpoint, config, 0, plan.shard(0), nullptr);
      // Vectors that lie in BF16 on the disk take four bytes here.
      EXPECT_NEAR(static_cast<double>(rank_memory(model, plan, {}, 64).weight_bytes()),
                  static_cast<double>(source.total_bytes()), 0.01 * static_cast<double>(source.total_bytes()))
          << plan.name();
    }
  }
}

}  // namespace
}  // namespace tessera::model
