// SPDX-License-Identifier: Apache-2.0
#include "model/rank_memory.h"

#include <algorithm>

#include "base/integer_math.h"
#include "comm/nccl.h"
#include "model/cache_pool.h"
#include "model/memory_fit.h"
#include "model/model.h"

namespace tessera::model {

namespace {

// A context with this program's modules is 0.5 GiB on an H200 (docs/performance/cuda.md: 556 to 597 MiB with a small
// model); graphs, ops' workspace and NCCL's channels: estimated.
constexpr uint64_t kRuntimeBytes = uint64_t{2} << 30;

std::string kind_of(const WeightRow& row) {
  const auto has = [&](const char* part) { return row.name.find(part) != std::string::npos; };
  if (row.expert >= 0) return "routed experts";
  if (has("shared_experts.")) return "shared experts";
  if (row.name == "embed") return "embedding";
  if (row.name == "head") return "head";
  if (row.shard != ShardRule::kReplicate) return "queries and outputs of heads";
  if (has("compressor.") || has("indexer.")) return "compressors and indexers";
  if (has("ffn.gate")) return "routers";
  if (row.kind == WeightKind::kLinear) return "maps of the input";
  return "hyper-connections, norms";
}

// Which of them ParallelPlan::cuts_projections cuts.
bool is_projection(const WeightRow& row, const std::string& kind) {
  return row.kind == WeightKind::kLinear && (kind == "maps of the input" || kind == "compressors and indexers");
}

}  // namespace

uint64_t slice_bytes(const WeightRow& row, ops::WeightFormat format, const WeightSlice& slice,
                     const PackedUnitShape& unit) {
  const int64_t rows = slice.row_end - slice.row_begin, cols = slice.col_end - slice.col_begin;
  if (row.kind == WeightKind::kVector || row.kind == WeightKind::kTable) {
    return static_cast<uint64_t>(4 * rows * (row.shape.num_elements() / row.shape[0]));
  }
  ops::WeightView codes{format, rows, cols}, scales = codes;
  if (format == ops::WeightFormat::kNvfp4) {
    codes.rows = scales.rows = round_up(rows, unit.rows);
    codes.cols = round_up(cols, unit.cols), scales.cols = round_up(cols, unit.scale_cols);
  }
  return static_cast<uint64_t>(codes.data_bytes() + scales.scale_bytes());
}

uint64_t RankMemory::weight_bytes() const {
  uint64_t sum = 0;
  for (const HeldWeights& held : weights) sum += held.bytes;
  return sum;
}

RankMemory rank_memory(const StoredModel& model, const ParallelPlan& plan, const ops::Precision& precision,
                       int64_t step_tokens, const PackedUnitShape& unit) {
  const Config& config = model.config;
  RankMemory memory;
  for (size_t i = 0; i < model.rows.size(); ++i) {
    const WeightRow& row = model.rows[i];
    const std::string kind = kind_of(row);
    auto held = std::find_if(memory.weights.begin(), memory.weights.end(),
                             [&](const HeldWeights& other) { return other.kind == kind; });
    if (held == memory.weights.end()) held = memory.weights.insert(held, {kind});
    const uint64_t parts =
        plan.cuts_projections && is_projection(row, kind) ? static_cast<uint64_t>(plan.world) : uint64_t{1};
    for (const Shard& shard : held_shards(row, plan.shard(0))) {
      const WeightSlice slice = slice_of(row, config, shard);
      const uint64_t bytes = ceil_div(slice_bytes(row, model.formats[i], slice, unit), parts);
      held->bytes += bytes;
      held->padding += bytes - ceil_div(slice_bytes(row, model.formats[i], slice), parts);
    }
    held->of += slice_bytes(row, model.formats[i], slice_of(row, config, {}));
  }
  std::sort(memory.weights.begin(), memory.weights.end(),
            [](const HeldWeights& a, const HeldWeights& b) { return a.of > b.of; });
  memory.step = Model::step_bytes(config, precision, step_tokens, plan.world);
  if (plan.shards_entries) {
    // Copies of other ranks' entries, of the longest sequence in one layer.
    int64_t ratio = 0;
    for (const int64_t one : config.compress_ratios) {
      if (one != 0 && (ratio == 0 || one < ratio)) ratio = one;
    }
    const int64_t entry_bytes = ops::kv_entry_layout(precision, config.head_dim, config.rope_dim).entry_bytes();
    if (ratio != 0)
      memory.step += static_cast<uint64_t>(CachePool::near_bytes(ratio, entry_bytes, config.max_positions));
  }
  memory.runtime = kRuntimeBytes + (plan.world > 1 ? static_cast<uint64_t>(comm::NcclOptions{}.scratch_bytes) : 0);
  memory.sequence = rank_sequence_bytes(config, plan, precision, 0, step_tokens);
  constexpr int64_t kTokens = int64_t{1} << 20;
  memory.token =
      static_cast<double>(rank_sequence_bytes(config, plan, precision, kTokens, step_tokens) - memory.sequence) /
      static_cast<double>(kTokens);
  return memory;
}

uint64_t rank_sequence_bytes(const Config& config, const ParallelPlan& plan, const ops::Precision& precision,
                             int64_t tokens, int64_t step_tokens) {
  return sequence_bytes(config, precision, tokens, ring_slots(config, step_tokens), plan.shard(0).entry_ranks());
}

}  // namespace tessera::model
