// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a model can be cut over ranks, and what that leaves each of them to hold: pure functions of the model's facts,
// but for what a checkpoint has (docs/decisions/0031-several-gpus.md). Which plan is best for a load, predictions of
// times say (bench/plan).
#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/weight_spec.h"
#include "ops/weight_view.h"

namespace tessera::model {

struct ParallelPlan {
  int64_t world = 1;
  AttentionSplit attention = AttentionSplit::kWhole;
  ExpertSplit experts = ExpertSplit::kById;
  int64_t fewest_tokens_to_cut = Shard{}.fewest_tokens_to_cut;  // of a step
  bool keeps_all_heads = false;  // each rank's, for its own tokens of steps that are cut (Shard)
  bool shards_entries = false;   // compressed entries: one copy among the ranks (Shard)
  // What no layer does yet, for planning.
  bool cuts_projections = false;  // of the input, of compressors and indexers: by rows, behind an all-gather a layer

  // Whether the layers compute it. A slice_of() with shard() is what a rank then holds.
  bool is_written() const { return !cuts_projections; }
  Shard shard(int64_t rank) const {
    return {rank, world, attention, experts, fewest_tokens_to_cut, keeps_all_heads, shards_entries};
  }
  // "heads, experts by width": short, for tables.
  std::string name() const;

  friend bool operator==(const ParallelPlan&, const ParallelPlan&) = default;
};

// Every plan whose parts are equal on all ranks, those that are written first; one for one rank. Throws
// kInvalidArgument for world < 1, kUnsupported, naming what can't be cut, where there is none.
std::vector<ParallelPlan> parallel_plans(const Config& config, int64_t world);

// The tensors of a model and how each is stored. Vectors and tables are held in four bytes a value.
struct StoredModel {
  Config config;
  std::vector<WeightRow> rows;
  std::vector<ops::WeightFormat> formats;  // of each row
};

// As published checkpoints store a map: routed experts NVFP4; embedding, head, router, compressors and the indexer's
// weights BF16; other maps, of attention and of the shared expert, `dense`.
ops::WeightFormat published_format(const WeightRow& row, ops::WeightFormat dense);
StoredModel published_model(const Config& config, ops::WeightFormat dense);
// The model with those other maps in `dense`, however it stores them.
StoredModel with_dense(StoredModel model, ops::WeightFormat dense);
// As the checkpoint in a folder, whose config is known, stores them. Reads headers alone; throws as Checkpoint::open()
// and WeightSource.
StoredModel checkpoint_model(const std::string& directory, const Config& config);

}  // namespace tessera::model
