// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which way of cutting a model is best on a machine under a load, by predicted memory and times; and that for people.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/plan/step_cost.h"
#include "model/rank_memory.h"

namespace tessera::bench {

// "8xh200", "h200", in whichever case: GPUs of one machine.
struct Gpus {
  int64_t count = 1;
  const Target* target = nullptr;
  uint64_t memory_bytes = 0;  // of each, as its driver says; 0: the target's
};
constexpr int64_t kMostGpus = 8;
// Throws kInvalidArgument naming what is expected.
Gpus parse_gpus(std::string_view text);

struct ServingLoad {
  int64_t context = 8192;  // tokens of each sequence
  int64_t sequences = 1;
  int64_t step_tokens = 4096;  // most of a step
  ops::Precision precision;
  // Tokens that one sequence by itself has to have room for too; 0: none. Reports and advice know nothing of it.
  int64_t longest = 0;
};

// Which plans may be chosen: those with what is named.
struct PlanChoice {
  std::optional<model::AttentionSplit> attention = {};
  std::optional<model::ExpertSplit> experts = {};
  std::optional<bool> shards_entries = {};
  bool allows(const model::ParallelPlan& plan) const {
    return plan.is_written() && attention.value_or(plan.attention) == plan.attention &&
           experts.value_or(plan.experts) == plan.experts &&
           shards_entries.value_or(plan.shards_entries) == plan.shards_entries;
  }
};

// As --rank-split takes it.
std::string_view rank_split_name(model::AttentionSplit attention, model::ExpertSplit experts);

struct Candidate {
  model::ParallelPlan plan;
  model::RankMemory memory;
  uint64_t sequence_bytes = 0;  // caches of one at the load's context
  uint64_t needed_bytes = 0;    // with all sequences, or with the longest one where that takes more
  bool fits = false;
  int64_t room = 0;   // sequences of the load's context beside weights and work
  StepCost decode;    // of all sequences, at the end of their context
  StepCost prefill;   // of a chunk in the middle of one's context
  int64_t chunk = 0;  // tokens of it
  // Why ranks have their own heads' maps alone, behind "the others' maps"; where heads are cut.
  std::string own_heads = {};
  double tokens_per_second(int64_t sequences) const { return static_cast<double>(sequences) / decode.us() * 1e6; }
  double prefill_tokens_per_second() const { return static_cast<double>(chunk) / prefill.us() * 1e6; }
};

struct MachinePlan {
  Gpus gpus;
  ServingLoad load;
  model::Config config;
  std::vector<Candidate> candidates;
  size_t chosen = 0;                // the fastest to decode of those that are written and fit, or that need least
  std::vector<std::string> why;     // a line for each choice
  std::vector<std::string> advice;  // where it does not fit
  const Candidate& best() const { return candidates[chosen]; }
  uint64_t capacity_bytes() const {
    return gpus.memory_bytes > 0 ? gpus.memory_bytes : static_cast<uint64_t>(gpus.target->capacity.low * 1e9);
  }
};

// Throws kInvalidArgument for a load that the model can't have, kUnsupported where nothing divides, or nothing that may
// be chosen.
MachinePlan plan_machine(const model::StoredModel& model, const Gpus& gpus, const ServingLoad& load,
                         const PlanChoice& choice = {});

// For who is about to load a model over `world` GPUs that the driver calls `gpu_name` and gives so much memory: as
// plan_machine(), by an H200's speed where nobody has figures of such GPUs, and with what the load asks for beyond the
// model's or the planner's limits lowered to these.
MachinePlan plan_ranks(const model::StoredModel& model, int64_t world, std::string_view gpu_name, uint64_t memory_bytes,
                       ServingLoad load, const PlanChoice& choice = {});

// What a rank holds, capacity, times by layer and by part, candidates.
std::string machine_plan_text(const MachinePlan& plan, const std::string& model_name);
// Every figure of it, as JSON.
std::string machine_plan_json(const MachinePlan& plan, const std::string& model_name);

}  // namespace tessera::bench
