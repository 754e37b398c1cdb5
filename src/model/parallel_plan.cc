// SPDX-License-Identifier: Apache-2.0
#include "model/parallel_plan.h"

#include <fmt/format.h>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "model/weight_format.h"
#include "model/weight_source.h"

namespace tessera::model {

namespace {

// Kernels of experts take 128 channels at a time, and scales of FP8 are of 128.
constexpr int64_t kWidthUnit = 128;

}  // namespace

std::string ParallelPlan::name() const {
  if (world == 1) return "one GPU";
  return fmt::format("{}, experts by {}{}{}", attention == AttentionSplit::kByGroup ? "heads" : "whole attention",
                     experts == ExpertSplit::kByWidth ? "width" : "id", cuts_projections ? ", projections" : "",
                     shards_entries ? ", entries sharded" : "");
}

std::vector<ParallelPlan> parallel_plans(const Config& config, int64_t world) {
  if (world < 1) fail(ErrorCode::kInvalidArgument, fmt::format("ranks: expected 1 or more, found {}", world));
  if (world == 1) return {ParallelPlan{}};
  const bool has_heads = config.o_groups % world == 0 && config.num_heads % world == 0;
  const bool has_width = config.expert_inner % (world * kWidthUnit) == 0, has_ids = config.num_experts % world == 0;
  std::vector<ParallelPlan> plans;
  for (const AttentionSplit attention : {AttentionSplit::kByGroup, AttentionSplit::kWhole}) {
    if (attention == AttentionSplit::kByGroup && !has_heads) continue;
    if (has_width) plans.push_back({.world = world, .attention = attention, .experts = ExpertSplit::kByWidth});
    if (has_ids) plans.push_back({.world = world, .attention = attention, .experts = ExpertSplit::kById});
  }
  if (plans.empty()) {
    fail(
        ErrorCode::kUnsupported,
        fmt::format(
            "{} experts of {} channels can't be cut over {} ranks: neither by id nor by width in runs of {}{}",
            config.num_experts, config.expert_inner, world, kWidthUnit,
            has_heads ? "" : fmt::format("; nor can {} heads in {} output groups", config.num_heads, config.o_groups)));
  }
  // Each with one thing more; what is not written where heads are cut.
  const std::vector<ParallelPlan> written = plans;
  for (ParallelPlan plan : written) {
    plan.shards_entries = true;
    plans.push_back(plan);
  }
  for (ParallelPlan plan : written) {
    if (plan.attention == AttentionSplit::kWhole) continue;
    plan.cuts_projections = true;
    plans.push_back(plan);
  }
  return plans;
}

namespace {

// Maps of attention and of the shared expert.
bool is_dense_map(const WeightRow& row) {
  return row.expert < 0 && row.kind == WeightKind::kLinear && row.name != "head" &&
         row.name.find("compressor.") == std::string::npos && !row.name.ends_with("weights_proj");
}

}  // namespace

ops::WeightFormat published_format(const WeightRow& row, ops::WeightFormat dense) {
  if (row.expert >= 0) return ops::WeightFormat::kNvfp4;
  return is_dense_map(row) ? dense : ops::WeightFormat::kBf16;
}

StoredModel with_dense(StoredModel model, ops::WeightFormat dense) {
  for (size_t i = 0; i < model.rows.size(); ++i) {
    if (is_dense_map(model.rows[i])) model.formats[i] = dense;
  }
  return model;
}

StoredModel published_model(const Config& config, ops::WeightFormat dense) {
  StoredModel model{config, make_weight_spec(config, 0), {}};
  for (const WeightRow& row : model.rows) model.formats.push_back(published_format(row, dense));
  return model;
}

StoredModel checkpoint_model(const std::string& directory, const Config& config) {
  StoredModel model = published_model(config, ops::WeightFormat::kBf16);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(directory);
  const WeightSource weights(checkpoint, config, 0, {}, nullptr, Inexact::kRound);
  for (size_t i = 0; i < model.rows.size(); ++i) {
    WeightRow& row = model.rows[i];
    const bool is_matrix = row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain;
    if (!is_matrix) continue;
    model.formats[i] = weights.format(row.name);
    row.scale_rows = rows_of_a_scale(weights.stored(row.name).format);
  }
  return model;
}

}  // namespace tessera::model
