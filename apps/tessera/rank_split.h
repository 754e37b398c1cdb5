// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which of its ways of being cut over ranks a model is cut by: the one that --rank-split names, or the best by
// predicted times (tessera plan).
#include <cstdint>
#include <string>
#include <string_view>

#include "device/gpu_facts.h"
#include "model/parallel_plan.h"
#include "ops/precision.h"

namespace tessera::bench {
struct PlanChoice;
}

namespace tessera::app {

inline constexpr std::string_view kAutoSplit = "auto", kAutoHeads = "auto", kOwnHeads = "own", kAllHeads = "all";
inline constexpr std::string_view kAutoCaches = "auto", kReplicated = "replicated", kSharded = "sharded";
constexpr int64_t kUsualContext = 8192;  // tokens for which plans are compared where nobody says how many

struct RankSplit {
  std::string_view name = {};  // as --rank-split takes it
  model::AttentionSplit attention = model::AttentionSplit::kWhole;
  model::ExpertSplit experts = model::ExpertSplit::kById;
  bool keeps_all_heads = false;  // model::Shard
  bool shards_entries = false;
  bool fits = true;      // what was planned for, where it was chosen
  std::string why = {};  // a line for people, where it was chosen
};

// Throws kInvalidArgument, naming those there are. Not for "auto".
RankSplit named_split(std::string_view name);

// On processors: the one whose results are one rank's, where the model can be cut so.
RankSplit cpu_split(const model::Config& config, int world);

// What a program has to have room for.
struct Sequences {
  int64_t count = 1;    // at once
  int64_t longest = 0;  // tokens that one of them may have; 0: not known
};
struct SplitLoad {
  Sequences sequences;
  int64_t step_tokens = 0;
  ops::Precision precision;
};
// On GPUs of that name: the shortest predicted decode step of what fits and may be chosen, by the figures of an H200
// where nobody has any of such GPUs. Where nothing divides, "experts", of which the cut itself says why not.
// Keeps all heads where they leave room for what is planned for, up to 32 sequences of 8,192 tokens or one of the
// longest; shards entries where that fits in no other way, or it is asked for.
RankSplit gpu_split(const model::StoredModel& model, int world, const device::GpuDevice& gpu, const SplitLoad& load,
                    const bench::PlanChoice& choice);

}  // namespace tessera::app
