// SPDX-License-Identifier: Apache-2.0
// Which plan is chosen, what it holds, and what is advised where none does.
#include "bench/plan/machine_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "model/cache_spec.h"
#include "tests/bench/published_models.h"

namespace tessera::bench {
namespace {

using model::AttentionSplit, model::ExpertSplit, model::ParallelPlan;
using ops::WeightFormat;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

TEST(MachinePlan, GpusAreReadOrRefused) {
  EXPECT_EQ(parse_gpus("8xh200").count, 8);
  EXPECT_EQ(parse_gpus("8xh200").target->name, "h200");
  EXPECT_EQ(parse_gpus("2xH200").target->name, "h200");
  EXPECT_EQ(parse_gpus("2XRTX6000").count, 2);
  EXPECT_EQ(parse_gpus("rtx6000").count, 1);
  EXPECT_EQ(parse_gpus("rtx6000").target->name, "rtx6000");
  for (const char* bad :
       {"", "8", "x", "8x", "0xh200", "9xh200", "-1xh200", "8xh200x", "8 xh200", "99999999999999999999xh200"}) {
    EXPECT_THROW(parse_gpus(bad), Error) << bad;
  }
}

TEST(MachinePlan, ProOnEightH200HoldsFourMillionTokens) {
  const MachinePlan plan =
      plan_machine(stored("pro", WeightFormat::kFp8Block), parse_gpus("8xh200"), {1 << 20, 4, 4096, {}});
  EXPECT_TRUE(plan.best().plan.is_written());
  EXPECT_TRUE(plan.best().fits);
  EXPECT_GE(plan.best().room, 4);
  EXPECT_THAT(machine_plan_text(plan, "pro"), HasSubstr("four sequences of 1,048,576 tokens, 4,194,304 in all"));
  EXPECT_THAT(machine_plan_text(plan, "pro"), HasSubstr("not written"));
  // The fastest of those that can run.
  for (const Candidate& other : plan.candidates) {
    if (!other.plan.is_written() || !other.fits) continue;
    EXPECT_GE(other.decode.us(), plan.best().decode.us()) << other.plan.name();
  }
  const auto json = nlohmann::json::parse(machine_plan_json(plan, "pro"));
  EXPECT_EQ(json["candidates"].size(), plan.candidates.size());
  EXPECT_EQ(json["longest_sequences"], plan.best().room);
}

// All heads' maps, 2 GB more of Flash on each of two, 9 of Pro on each of eight: in an eighth of what weights leave.
TEST(MachinePlan, AllHeadsAreKeptWhereThereIsRoom) {
  const auto best = [](const char* model, const char* gpus) {
    return plan_machine(stored(model), parse_gpus(gpus), {8192, 1, 4096, {}});
  };
  const MachinePlan flash = best("flash", "2xh200"), pro = best("pro", "8xh200");
  EXPECT_TRUE(flash.best().plan.keeps_all_heads);
  EXPECT_FALSE(pro.best().plan.keeps_all_heads);
  EXPECT_THAT(machine_plan_text(flash, "flash"), HasSubstr("all heads of a rank's own tokens"));
  // Which it is: room, beside weights or beside the load, or use.
  EXPECT_THAT(pro.why, Contains(MatchesRegex("prompts: .*; the others' maps have no room: [0-9.]+ GB more, and [0-9.]+ "
                                             "of what weights leave are free for them")));
  const std::string others = "prompts: attention of a rank's heads of all tokens; the others' maps ";
  EXPECT_THAT(
      best("flash", "8xh200").why,
      Contains(others + "are of no use: attention of 8 heads has another kernel, whose bits that of 64 need not have"));
  EXPECT_THAT(plan_machine(stored("flash"), parse_gpus("2xh200"), {8192, 1, 1023, {}}).why,
              Contains(others + "are of no use: steps are cut by token from 1024 tokens on"));
  const int64_t most = flash.best().room;
  const MachinePlan full = plan_machine(stored("flash"), parse_gpus("2xh200"), {8192, most + 10, 4096, {}});
  EXPECT_THAT(full.why, Contains(MatchesRegex(others + "have no room: [0-9.]+ GB more, and the load leaves [0-9.]+")));
  for (const Candidate& candidate : flash.candidates) {
    const ParallelPlan& plan = candidate.plan;
    EXPECT_EQ(plan.keeps_all_heads, plan.attention == AttentionSplit::kByGroup && plan.is_written()) << plan.name();
  }
  // From one byte to the next.
  const auto keeps_all = [](int64_t world, const char* gpu, uint64_t memory, int64_t step_tokens) {
    const MachinePlan plan = plan_ranks(stored("flash"), world, gpu, memory, {8192, 1, step_tokens, {}});
    return std::any_of(plan.candidates.begin(), plan.candidates.end(),
                       [](const Candidate& candidate) { return candidate.plan.keeps_all_heads; });
  };
  const auto has_room = [&](uint64_t memory) { return keeps_all(2, "NVIDIA H200", memory, 1024); };
  EXPECT_FALSE(keeps_all(2, "NVIDIA H200", uint64_t{1} << 40, 1023)) << "no step is cut";
  EXPECT_FALSE(keeps_all(8, "NVIDIA H200", uint64_t{1} << 40, 4096)) << "8 heads";
  EXPECT_TRUE(keeps_all(8, "NVIDIA B200", uint64_t{1} << 40, 4096));
  uint64_t least = 0;
  for (uint64_t step = uint64_t{1} << 40; step > 0; step /= 2) {
    if (!has_room(least + step)) least += step;
  }
  const auto weights = [&](uint64_t memory) {
    for (const Candidate& candidate :
         plan_ranks(stored("flash"), 2, "NVIDIA H200", memory, {8192, 1, 1024, {}}).candidates) {
      if (candidate.plan.experts == ExpertSplit::kByWidth) return candidate.memory.weight_bytes();
    }
    return uint64_t{0};
  };
  const uint64_t own = weights(least), all = weights(least + 1);
  EXPECT_NEAR(static_cast<double>(all - own), 43 * (2.5 * 32768 * 1024) * 9 / 16, 1e7) << "wq_b, wo_a, half of wo_b";
  EXPECT_LE(all - own, (least + 1 - own) / 8);
  EXPECT_GT(all - own, (least - own) / 8);
  EXPECT_FALSE(has_room(own / 2)) << "not even the weights";
}

// Decode chooses; of prompts it is said where another plan is clearly faster, and how to have it.
TEST(MachinePlan, PlansOfFasterPromptsAreNamed) {
  const model::StoredModel& flash = stored("flash", WeightFormat::kFp8Block);
  const MachinePlan plan = plan_machine(flash, parse_gpus("8xh200"), {8192, 1, 4096, {}});
  const auto fastest =
      std::min_element(plan.candidates.begin(), plan.candidates.end(), [](const Candidate& a, const Candidate& b) {
        return std::pair(!a.plan.is_written(), a.prefill.us()) < std::pair(!b.plan.is_written(), b.prefill.us());
      });
  ASSERT_GT(plan.best().prefill.us(), 1.25 * fastest->prefill.us());
  const std::string split(rank_split_name(fastest->plan.attention, fastest->plan.experts));
  EXPECT_THAT(plan.why, Contains(HasSubstr("prompts are faster with --rank-split " + split + " (\"" +
                                           fastest->plan.name() + "\"): ")));
  const MachinePlan two = plan_machine(flash, parse_gpus("2xh200"), {8192, 1, 4096, {}});
  EXPECT_THAT(two.why, Not(Contains(HasSubstr("prompts are faster"))));
}

TEST(MachinePlan, WhatDoesNotFitComesWithAdvice) {
  const model::StoredModel& flash = stored("flash", WeightFormat::kFp8Block);
  const MachinePlan plan = plan_machine(flash, parse_gpus("h200"), {8192, 1, 4096, {}});
  EXPECT_FALSE(plan.best().fits);
  EXPECT_THAT(plan.advice, Contains(HasSubstr("try --gpus 2xh200")));
  // What is advised does fit.
  const MachinePlan many = plan_machine(flash, parse_gpus("2xh200"), {131072, 2000, 4096, {}});
  EXPECT_FALSE(many.best().fits);
  ASSERT_GT(many.best().room, 0);
  const MachinePlan fewer = plan_machine(flash, parse_gpus("2xh200"), {131072, many.best().room, 4096, {}});
  EXPECT_TRUE(fewer.best().fits);
  EXPECT_TRUE(fewer.advice.empty());
  // Smaller steps, alone and with NVFP4, before it is said that no machine will do.
  const ops::Precision a4{ops::InputMode::kA4};
  const model::StoredModel& pro = stored("pro", WeightFormat::kFp8Block);
  const MachinePlan tight = plan_machine(pro, parse_gpus("8xgb10"), {8192, 1, 4096, a4});
  EXPECT_THAT(tight.advice, ElementsAre(HasSubstr("try --dense nvfp4 --step-tokens 64:")));
  EXPECT_FALSE(plan_machine(pro, parse_gpus("8xgb10"), {8192, 1, 64, a4}).best().fits);
  EXPECT_TRUE(plan_machine(stored("pro"), parse_gpus("8xgb10"), {8192, 1, 64, a4}).best().fits);
  EXPECT_THAT(plan_machine(stored("pro"), parse_gpus("8xgb10"), {8192, 1, 512, a4}).advice,
              Contains(HasSubstr("try --step-tokens 64:")));
  // Dense maps of BF16 gain as well.
  const model::StoredModel plain = with_dense(pro, WeightFormat::kBf16);
  EXPECT_THAT(plan_machine(plain, parse_gpus("8xgb10"), {8192, 1, 4096, a4}).advice,
              Contains(HasSubstr("try --dense nvfp4 --step-tokens 64:")));
  EXPECT_THAT(plan_machine(stored("pro"), parse_gpus("gb10"), {8192, 1, 4096, a4}).advice,
              ElementsAre(HasSubstr("try --gpus 8xgb10 --step-tokens 64:")));
  // Where more GPUs hold it in NVFP4 alone, they do so from fewer as well.
  for (const char* gpus : {"gb10", "4xgb10"}) {
    EXPECT_THAT(plan_machine(pro, parse_gpus(gpus), {8192, 1, 4096, a4}).advice,
                ElementsAre(HasSubstr("try --gpus 8xgb10 --dense nvfp4 --step-tokens 64:")))
        << gpus;
  }
  // The portable kernels' units pad less.
  EXPECT_THAT(plan_machine(pro, parse_gpus("gb10"), {8192, 1, 4096, {}}).advice,
              ElementsAre(HasSubstr("try --gpus 8xgb10 --dense nvfp4 --step-tokens 512:")));
  // Of a load that no machine holds, what the largest one does.
  const ServingLoad most = {pro.config.max_positions, 64, 64, {}};
  const std::string largest = plan_machine(pro, parse_gpus("gb10"), most).advice.at(0);
  EXPECT_THAT(largest,
              HasSubstr("no machine of 8 such GPUs holds it; try --gpus 8xgb10 --dense nvfp4 --batch 1 --con"));
  const int64_t context = std::stoll(largest.substr(largest.find("--context ") + 10));
  EXPECT_TRUE(plan_machine(stored("pro"), parse_gpus("8xgb10"), {context, 1, 64, {}}).best().fits) << largest;
  EXPECT_TRUE(context == most.context ||
              !plan_machine(stored("pro"), parse_gpus("8xgb10"), {context + model::kPageTokens, 1, 64, {}}).best().fits)
      << largest;
}

// Pro's experts cut by width over eight have rows of 384 columns in w2, with scales for 512: 61 layers of 384 routed
// experts and the shared one. By id nothing is padded. Four sequences of a million fit both ways.
TEST(MachinePlan, PaddingOfUnitsIsCounted) {
  const model::StoredModel& pro = stored("pro", WeightFormat::kFp8Block);
  constexpr int64_t kMillion = 1'048'448;
  const MachinePlan plan = plan_machine(pro, parse_gpus("8xh200"), {kMillion, 4, 4096, {}});
  const auto padding_of = [&](ExpertSplit experts) {
    for (const Candidate& c : plan.candidates) {
      if (c.plan.experts != experts || c.plan.attention != AttentionSplit::kByGroup || !c.plan.is_written()) continue;
      uint64_t padding = 0;
      for (const model::HeldWeights& held : c.memory.weights) padding += held.padding;
      EXPECT_TRUE(c.fits);
      return static_cast<double>(padding);
    }
    return -1.0;
  };
  const double routed = 61.0 * 384 * 7168 * 128 / 16;
  EXPECT_NEAR(padding_of(ExpertSplit::kByWidth), routed, 0.01 * routed);
  EXPECT_LT(padding_of(ExpertSplit::kById), 0.001 * routed);
  EXPECT_EQ(plan.best().plan.experts, ExpertSplit::kByWidth);
  // With projections cut too what is left without it is a rank's share of the model.
  for (const Candidate& c : plan.candidates) {
    for (const model::HeldWeights& held : c.memory.weights) {
      EXPECT_LE(held.padding, held.bytes) << held.kind;
      EXPECT_LE(held.bytes - held.padding, held.of) << held.kind;
    }
  }
  const MachinePlan one = plan_machine(pro, parse_gpus("8xh200"), {8192, 1, 4096, {}});
  EXPECT_THAT(machine_plan_text(one, "pro"), HasSubstr("of it padding to the kernels' units"));
  const auto json = nlohmann::json::parse(machine_plan_json(one, "pro"));
  EXPECT_NEAR(json.at("candidates").at(0).at("memory").at("weights").at(0).at("padding").get<double>(), routed,
              0.01 * routed);
}

TEST(MachinePlan, RanksOfADriversGpusAreThoseOfItsFigures) {
  const model::StoredModel& flash = stored("flash");
  for (const auto& [gpu, name] : {std::pair{"NVIDIA H200", "h200"},
                                  {"NVIDIA H100 80GB HBM3", "h100"},
                                  {"NVIDIA B200", "b200"},
                                  {"NVIDIA GB300", "b300"},
                                  {"NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000"},
                                  {"NVIDIA GB10", "gb10"}}) {
    ASSERT_NE(target_of_gpu(gpu), nullptr) << gpu;
    EXPECT_EQ(target_of_gpu(gpu)->name, name) << gpu;
  }
  EXPECT_EQ(target_of_gpu("NVIDIA A100-SXM4-80GB"), nullptr);
  EXPECT_EQ(target_of_gpu("NVIDIA GH200 480GB"), nullptr);
  // What fits is judged by the memory that is there.
  const ServingLoad short_load = {8192, 1, 64, {}};
  EXPECT_TRUE(plan_ranks(flash, 2, "a GPU without figures", uint64_t{150} << 30, short_load).best().fits);
  EXPECT_FALSE(plan_ranks(flash, 2, "a GPU without figures", uint64_t{40} << 30, short_load).best().fits);
  const MachinePlan plan = plan_ranks(flash, 2, "NVIDIA H200", 0, {8192, 1, 4096, {}});
  EXPECT_EQ(plan.best().plan, plan_machine(flash, parse_gpus("2xh200"), {8192, 1, 4096, {}}).best().plan);
  EXPECT_TRUE(plan.best().plan.is_written());
  for (const Candidate& other : plan.candidates) {
    if (!other.plan.is_written()) continue;
    EXPECT_LE(plan.best().decode.us(), other.decode.us()) << other.plan.name();
  }
  // Entries are sharded where nothing else holds the load, and not where somebody says otherwise.
  const uint64_t tight = uint64_t{99} << 30;
  const ServingLoad many = {8192, 512, 1024, {}};
  EXPECT_TRUE(plan_ranks(flash, 2, "NVIDIA H200", uint64_t{120} << 30, many).best().fits);
  EXPECT_FALSE(plan_ranks(flash, 2, "NVIDIA H200", uint64_t{120} << 30, many).best().plan.shards_entries);
  const Candidate sharded = plan_ranks(flash, 2, "NVIDIA H200", tight, many).best();
  EXPECT_TRUE(sharded.fits && sharded.plan.shards_entries) << sharded.needed_bytes;
  const Candidate replicated = plan_ranks(flash, 2, "NVIDIA H200", tight, many, {.shards_entries = false}).best();
  EXPECT_FALSE(replicated.fits || replicated.plan.shards_entries) << replicated.needed_bytes;
  const PlanChoice by_id{.attention = model::AttentionSplit::kWhole, .experts = model::ExpertSplit::kById};
  const Candidate named = plan_ranks(flash, 2, "NVIDIA H200", tight, many, by_id).best();
  EXPECT_TRUE(named.plan.shards_entries && by_id.allows(named.plan));
  // So they are where one sequence is that long, though few are planned for.
  const ServingLoad few = {8192, 1, 1024, {}}, one_of_a_million = {8192, 1, 1024, {}, 1 << 20};
  const uint64_t whole_caches =
      plan_ranks(flash, 2, "NVIDIA H200", uint64_t{1} << 30, one_of_a_million, {.shards_entries = false})
          .best()
          .needed_bytes;
  const uint64_t less = whole_caches - (uint64_t{1} << 30);
  EXPECT_FALSE(plan_ranks(flash, 2, "NVIDIA H200", less, few).best().plan.shards_entries);
  const Candidate of_longest = plan_ranks(flash, 2, "NVIDIA H200", less, one_of_a_million).best();
  EXPECT_TRUE(of_longest.fits && of_longest.plan.shards_entries) << of_longest.needed_bytes;
  // One that no model has is as long as the model's longest.
  const ServingLoad endless = {8192, 1, 1024, {}, INT64_MAX};
  EXPECT_EQ(plan_ranks(flash, 2, "NVIDIA H200", less, endless).best().needed_bytes, of_longest.needed_bytes);
  // GPUs that do not read each other's memory have no such plans.
  for (const Candidate& other : plan_machine(flash, parse_gpus("2xrtx6000"), {8192, 1, 4096, {}}).candidates) {
    EXPECT_FALSE(other.plan.shards_entries);
  }
  EXPECT_THROW(plan_machine(flash, parse_gpus("2xrtx6000"), {8192, 1, 4096, {}}, {.shards_entries = true}), Error);
  // Nobody's figures, more ranks than a machine has GPUs, and more than the model or a step takes.
  const MachinePlan odd = plan_ranks(flash, 16, "", 0, {1 << 30, 1 << 20, 1 << 20, {}});
  EXPECT_EQ(odd.gpus.target->name, "h200");
  EXPECT_EQ(odd.best().plan.world, 16);
  EXPECT_EQ(odd.load.context, flash.config.max_positions);
  EXPECT_EQ(odd.load.sequences, odd.load.step_tokens);
}

TEST(MachinePlan, BadLoadsAreNamed) {
  const model::StoredModel& flash = stored("flash");
  const Gpus gpus = parse_gpus("2xh200");
  for (const ServingLoad& load :
       {ServingLoad{0, 1, 4096, {}}, ServingLoad{(1 << 20) + 1, 1, 4096, {}}, ServingLoad{4096, 0, 4096, {}},
        ServingLoad{4096, 65, 64, {}}, ServingLoad{4096, 1, 0, {}}}) {
    EXPECT_THROW(plan_machine(flash, gpus, load), Error) << load.context << ' ' << load.sequences;
  }
}

}  // namespace
}  // namespace tessera::bench
