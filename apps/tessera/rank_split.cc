// SPDX-License-Identifier: Apache-2.0
#include "rank_split.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/strings.h"
#include "bench/plan/machine_plan.h"
#include "usage.h"

namespace tessera::app {

namespace {

using model::AttentionSplit, model::ExpertSplit, model::ParallelPlan;

constexpr int64_t kUsualSequences = 32;  // a server that may take hundreds seldom has them

const std::array<RankSplit, 4>& splits() {
  static const std::array<RankSplit, 4> all = [] {
    std::array<RankSplit, 4> of{{{.attention = AttentionSplit::kWhole, .experts = ExpertSplit::kById},
                                 {.attention = AttentionSplit::kByGroup, .experts = ExpertSplit::kById},
                                 {.attention = AttentionSplit::kByGroup, .experts = ExpertSplit::kByWidth},
                                 {.attention = AttentionSplit::kWhole, .experts = ExpertSplit::kByWidth}}};
    for (RankSplit& split : of) split.name = bench::rank_split_name(split.attention, split.experts);
    return of;
  }();
  return all;
}

RankSplit split_of(const ParallelPlan& plan) {
  return *std::find_if(splits().begin(), splits().end(), [&](const RankSplit& split) {
    return split.attention == plan.attention && split.experts == plan.experts;
  });
}

}  // namespace

RankSplit named_split(std::string_view name) {
  const auto found =
      std::find_if(splits().begin(), splits().end(), [&](const auto& split) { return split.name == name; });
  if (found == splits().end()) {
    fail_usage(fmt::format("--rank-split: expected auto, experts, heads, width or experts-width, found \"{}\"",
                           printable(name, 40)));
  }
  return *found;
}

RankSplit cpu_split(const model::Config& config, int world) try {
  const std::vector<ParallelPlan> plans = model::parallel_plans(config, world);
  const bool has_ids =
      std::any_of(plans.begin(), plans.end(), [](const auto& plan) { return plan.experts == ExpertSplit::kById; });
  return has_ids ? splits().front() : split_of(plans.front());
} catch (const Error& error) {
  if (error.code() != ErrorCode::kUnsupported) throw;
  return splits().front();
}

RankSplit gpu_split(const model::StoredModel& model, int world, const device::GpuDevice& gpu, const SplitLoad& load,
                    const bench::PlanChoice& choice) try {
  const bench::MachinePlan plan = bench::plan_ranks(model, world, gpu.name, gpu.memory_bytes,
                                                    {kUsualContext, std::min(load.sequences.count, kUsualSequences),
                                                     load.step_tokens, load.precision, load.sequences.longest},
                                                    choice);
  const bench::Candidate& best = plan.best();
  RankSplit split = split_of(best.plan);
  split.keeps_all_heads = best.plan.keeps_all_heads, split.shards_entries = best.plan.shards_entries;
  split.fits = best.fits;
  split.why = fmt::format(
      "--rank-split {} ({}): {}; a step of {} sequence{} behind {} tokens is predicted to take {:.2f} ms by the "
      "figures of {}{}",
      split.name, best.plan.name(), best.fits ? "the fastest that fits" : "needs the least memory", plan.load.sequences,
      plan.load.sequences == 1 ? "" : "s", plan.load.context, best.decode.us() / 1e3, plan.gpus.target->gpu,
      bench::target_of_gpu(gpu.name) != nullptr ? ""
                                                : fmt::format(", as there are none of {}", printable(gpu.name, 60)));
  return split;
} catch (const Error& error) {
  if (error.code() != ErrorCode::kUnsupported) throw;
  return splits().front();
}

}  // namespace tessera::app
