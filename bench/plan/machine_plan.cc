// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/machine_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "backends/cuda_common/packed_units.h"
#include "backends/sm100/packed_tiles.h"
#include "backends/sm120/scaled_units.h"
#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "model/cache_spec.h"

namespace tessera::bench {

namespace {

namespace cuda_common = backends::cuda_common;
namespace sm100 = backends::sm100;
namespace sm120 = backends::sm120;
using model::AttentionSplit, model::ExpertSplit, model::ParallelPlan, model::StoredModel;

constexpr int64_t kMostStepTokens = 65536, kFewestStepTokens = 64;  // the fewest of those that are advised

// All heads are kept where they take at most this part of what a rank's own weights leave: the rest is for caches.
constexpr uint64_t kShareOfHeads = 8;
constexpr int64_t kMostStreamSequences = 8;  // whose maps are streamed (cuda_common/weight_stream.cuh)
constexpr double kClearlySlower = 1.25;      // of steps of prompts
constexpr int64_t kFewestWideHeads = 16;     // that sm90's attention takes (backends/sm90/attention.cu)

[[noreturn]] void fail_gpus(std::string_view text) {
  std::string names;
  for (const Target& target : targets()) names += fmt::format("{}{}", names.empty() ? "" : ", ", target.name);
  fail(ErrorCode::kInvalidArgument, fmt::format("--gpus: expected 1 to {} of one of {}, as in 8xh200, found \"{}\"",
                                                kMostGpus, names, printable(text, 60)));
}

void check_load(const model::Config& config, const ServingLoad& load) {
  const auto check = [](const char* what, int64_t value, int64_t most, const char* note) {
    if (value >= 1 && value <= most) return;
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected 1 to {}{}, found {}", what, most, note, value));
  };
  check("--context", load.context, config.max_positions, ", the model's limit");
  check("--step-tokens", load.step_tokens, kMostStepTokens, "");
  check("--batch", load.sequences, load.step_tokens, ", the tokens of a step (--step-tokens)");
}

// In which the GPU's kernels keep NVFP4 weights; Blackwell's own take NVFP4 inputs alone, others are the portable
// ones'.
model::PackedUnitShape packed_unit(Family family, ops::InputMode input) {
  if (input != ops::InputMode::kA4) family = Family::kHopper;
  switch (family) {
    case Family::kHopper: {
      using Unit = cuda_common::PackedNvfp4;
      return {Unit::kRows, Unit::kColumns / Unit::kBlocks, Unit::kColumns};
    }
    case Family::kTensorMemory:
      return {sm100::PackedTile::kRows, sm100::PackedTile::kColumns, sm100::PackedTile::kColumns};
    case Family::kWarpProducts:
      return {sm120::WeightUnit::kRows, sm120::kUnitColumns, sm120::kUnitColumns};
  }
  return {};
}

// Caches are sharded where GPUs read each other's memory.
std::vector<ParallelPlan> plans_on(const Target& target, const model::Config& config, int64_t world) {
  std::vector<ParallelPlan> plans = model::parallel_plans(config, world);
  if (target.peer_rate.low == 0) std::erase_if(plans, [](const ParallelPlan& plan) { return plan.shards_entries; });
  return plans;
}

// Memory alone.
Candidate held(const StoredModel& model, const ParallelPlan& plan, const Target& target, uint64_t capacity,
               const ServingLoad& load) {
  Candidate c;
  c.plan = plan;
  c.memory =
      rank_memory(model, plan, load.precision, load.step_tokens, packed_unit(target.family, load.precision.input));
  c.sequence_bytes = rank_sequence_bytes(model.config, plan, load.precision, load.context, load.step_tokens);
  const uint64_t longest = rank_sequence_bytes(model.config, plan, load.precision, load.longest, load.step_tokens);
  c.needed_bytes = c.memory.fixed() + std::max(c.sequence_bytes * static_cast<uint64_t>(load.sequences), longest);
  c.fits = c.needed_bytes <= capacity;
  if (c.memory.fixed() < capacity) c.room = static_cast<int64_t>((capacity - c.memory.fixed()) / c.sequence_bytes);
  return c;
}

// Why ranks of a plan do not keep all heads' maps beside their own (model::Shard), which they do ("") where steps are
// large enough to be cut by token and kernels alike, and they take no more than an eighth of what a rank's weights
// leave of its memory.
std::string why_own_heads(const StoredModel& model, ParallelPlan plan, const Target& target, uint64_t capacity,
                          const ServingLoad& load) {
  const int64_t heads = model.config.num_heads, own_heads = heads / plan.world;
  if (load.step_tokens < plan.fewest_tokens_to_cut) {
    return fmt::format("are of no use: steps are cut by token from {} tokens on", plan.fewest_tokens_to_cut);
  }
  // The few heads of a rank have another kernel then, whose bits all heads' are not said to have.
  if (target.family == Family::kHopper && own_heads < kFewestWideHeads) {
    return fmt::format("are of no use: attention of {} heads has another kernel, whose bits that of {} need not have",
                       own_heads, heads);
  }
  const model::PackedUnitShape unit = packed_unit(target.family, load.precision.input);
  const auto bytes = [&] { return rank_memory(model, plan, {}, 1, unit).weight_bytes(); };
  plan.keeps_all_heads = false;
  const uint64_t own = bytes();
  plan.keeps_all_heads = true;
  const uint64_t more = bytes() - own, left = own < capacity ? (capacity - own) / kShareOfHeads : 0;
  if (own < capacity && more <= left) return "";
  return fmt::format("have no room: {:.2f} GB more, and {:.2f} of what weights leave are free for them",
                     static_cast<double>(more) / 1e9, static_cast<double>(left) / 1e9);
}

// Whether a written plan of so many GPUs holds the load.
bool holds(const StoredModel& model, int64_t world, const Target& target, uint64_t capacity, const ServingLoad& load) {
  try {
    const std::vector<ParallelPlan> plans = plans_on(target, model.config, world);
    return std::any_of(plans.begin(), plans.end(), [&](const ParallelPlan& plan) {
      return plan.is_written() && held(model, plan, target, capacity, load).fits;
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

// The largest steps with which so many GPUs hold the load: its own, 512 or 64 tokens, but a token of each sequence; 0:
// none.
int64_t steps_that_hold(const StoredModel& model, int64_t world, const Target& target, uint64_t capacity,
                        ServingLoad load) {
  const int64_t asked = load.step_tokens;
  for (const int64_t most : {asked, int64_t{512}, kFewestStepTokens}) {
    load.step_tokens = std::max(most, load.sequences);
    if (load.step_tokens <= asked && holds(model, world, target, capacity, load)) return load.step_tokens;
  }
  return 0;
}

// Flags of the machine and of what differs from the load; NVFP4 where `is_smaller`.
std::string machine_flags(const MachinePlan& plan, int64_t world, bool is_smaller, int64_t step_tokens) {
  return fmt::format("--gpus {}x{}{}{}", world, plan.gpus.target->name, is_smaller ? " --dense nvfp4" : "",
                     step_tokens < plan.load.step_tokens ? fmt::format(" --step-tokens {}", step_tokens) : "");
}

// The fewest more GPUs that hold the load: with the weights as they are, else with the smaller ones; "": none.
std::string more_gpus_for(const StoredModel& model, const StoredModel& smaller, const MachinePlan& plan) {
  for (const StoredModel* of : {&model, &smaller}) {
    const bool is_smaller = of == &smaller;
    if (is_smaller && smaller.formats == model.formats) break;
    for (int64_t world = plan.gpus.count + 1; world <= kMostGpus; ++world) {
      const int64_t most = steps_that_hold(*of, world, *plan.gpus.target, plan.capacity_bytes(), plan.load);
      if (most == 0) continue;
      return fmt::format("try {}: the fewest more that hold it{}", machine_flags(plan, world, is_smaller, most),
                         is_smaller ? " (tessera convert makes such a checkpoint)" : "");
    }
  }
  return "";
}

// Where no machine holds the load: the longest context of one sequence that the largest one holds, if any.
std::string smaller_load_for(const StoredModel& smaller, const MachinePlan& plan) {
  ServingLoad load = plan.load;
  load.sequences = 1, load.step_tokens = std::min(kFewestStepTokens, plan.load.step_tokens);
  int64_t low = 0, high = ceil_div(plan.load.context, model::kPageTokens);
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    load.context = std::min(middle * model::kPageTokens, plan.load.context);
    if (holds(smaller, kMostGpus, *plan.gpus.target, plan.capacity_bytes(), load)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == 0) {
    return fmt::format(
        "no machine of {} such GPUs holds the model, not even with --dense nvfp4 --step-tokens {}: GPUs with more "
        "memory are needed",
        kMostGpus, load.step_tokens);
  }
  return fmt::format("no machine of {} such GPUs holds it; try {} --batch 1 --context {}: the most that one holds",
                     kMostGpus, machine_flags(plan, kMostGpus, true, load.step_tokens),
                     std::min(low * model::kPageTokens, plan.load.context));
}

std::vector<std::string> advice_for(const StoredModel& model, const MachinePlan& plan) {
  const Candidate& best = plan.best();
  const uint64_t capacity = plan.capacity_bytes();
  std::vector<std::string> advice;
  if (best.room > 0) advice.push_back(fmt::format("try --batch {}: as many sequences of this context fit", best.room));
  // The longest context at which all sequences fit.
  const auto fits_at = [&](int64_t tokens) {
    const uint64_t one =
        rank_sequence_bytes(model.config, best.plan, plan.load.precision, tokens, plan.load.step_tokens);
    return best.memory.fixed() + one * static_cast<uint64_t>(plan.load.sequences) <= capacity;
  };
  int64_t low = 0, high = plan.load.context / model::kPageTokens;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (fits_at(middle * model::kPageTokens)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low > 0) advice.push_back(fmt::format("try --context {}: the longest at this batch", low * model::kPageTokens));
  const StoredModel smaller = model::with_dense(model, ops::WeightFormat::kNvfp4);
  const auto steps = [&](const StoredModel& of, int64_t world) {
    return steps_that_hold(of, world, *plan.gpus.target, capacity, plan.load);
  };
  const int64_t shorter = steps(model, plan.gpus.count);
  if (shorter > 0) advice.push_back(fmt::format("try --step-tokens {}: smaller work space", shorter));
  const int64_t nvfp4_steps = smaller.formats != model.formats ? steps(smaller, plan.gpus.count) : 0;
  if (nvfp4_steps == plan.load.step_tokens) {
    advice.push_back("try --dense nvfp4: fits (tessera convert makes such a checkpoint)");
  } else if (nvfp4_steps > shorter) {
    advice.push_back(
        fmt::format("try --dense nvfp4 --step-tokens {}: fits (tessera convert makes such a checkpoint)", nvfp4_steps));
  }
  if (const std::string more = more_gpus_for(model, smaller, plan); !more.empty()) advice.push_back(more);
  if (advice.empty()) advice.push_back(smaller_load_for(smaller, plan));
  return advice;
}

// The plan that may be chosen instead, whose prompts are clearly faster, and the flags for it; "": none.
std::string faster_prompts(const MachinePlan& plan) {
  const Candidate& best = plan.best();
  const Candidate* fastest = nullptr;
  for (const Candidate& other : plan.candidates) {
    if (!other.fits || !other.plan.is_written()) continue;
    if (fastest == nullptr || other.prefill.us() < fastest->prefill.us()) fastest = &other;
  }
  if (!best.fits || best.prefill.us() < kClearlySlower * fastest->prefill.us()) return "";
  const bool is_sharded = fastest->plan.shards_entries;
  const std::string caches = is_sharded == best.plan.shards_entries ? ""
                             : is_sharded                           ? " --rank-caches sharded"
                                                                    : " --rank-caches replicated";
  return fmt::format(
      "prompts are faster with --rank-split {}{} (\"{}\"): {:.1f} ms a step, here {:.1f}; decode {:.2f} ms",
      rank_split_name(fastest->plan.attention, fastest->plan.experts), caches, fastest->plan.name(),
      fastest->prefill.us() / 1e3, best.prefill.us() / 1e3, fastest->decode.us() / 1e3);
}

// Which kernels NVFP4 has where that is a matter of the inputs.
std::string kernels_of(const StoredModel& model, const MachinePlan& plan) {
  const Family family = plan.gpus.target->family;
  if (family == Family::kHopper) return "";
  if (plan.load.precision.input != ops::InputMode::kA4) {
    return "kernels: the portable ones, of BF16 inputs; those of NVFP4 products take NVFP4 inputs (--mode a4)";
  }
  const std::string own = "kernels: NVFP4 products of NVFP4 inputs (--mode a4)";
  if (model.formats != model::with_dense(model, ops::WeightFormat::kNvfp4).formats) {
    return own + "; the portable ones of maps in other formats";
  }
  if (family != Family::kTensorMemory || plan.load.sequences > kMostStreamSequences) return own;
  return own +
         ", whose tiles of 128 rows leave most multiprocessors idle where maps have few rows: of few tokens FP8 maps, "
         "which are streamed, may take less";
}

std::vector<std::string> reasons(const MachinePlan& plan) {
  const model::Config& c = plan.config;
  const Candidate& best = plan.best();
  const int64_t world = best.plan.world;
  std::vector<std::string> why;
  if (world == 1) return {"one GPU has everything"};
  if (best.plan.attention == AttentionSplit::kByGroup) {
    why.push_back(fmt::format("attention: {} of {} heads ({} of {} output groups) on each rank; a sum a layer",
                              c.num_heads / world, c.num_heads, c.o_groups / world, c.o_groups));
    why.push_back(
        best.plan.keeps_all_heads
            ? "prompts: attention of all heads of a rank's own tokens, for which it holds all heads' maps"
            : fmt::format("prompts: attention of a rank's heads of all tokens; the others' maps {}", best.own_heads));
  } else {
    why.push_back(fmt::format("attention: all {} heads on every rank; no sum", c.num_heads));
  }
  if (best.plan.experts == ExpertSplit::kByWidth) {
    why.push_back(
        fmt::format("experts: {} of {} channels of each of {}, and of the shared one; every rank has as much to do; a "
                    "sum of one vector a token",
                    c.expert_inner / world, c.expert_inner, c.num_experts));
  } else {
    why.push_back(
        fmt::format("experts: {} of {}, whole, on each rank, the shared one on all; the fullest rank is waited for; a "
                    "sum of {} vectors a token",
                    c.num_experts / world, c.num_experts, c.experts_per_token));
  }
  why.push_back(
      best.plan.shards_entries
          ? "caches: compressed entries once, on the ranks in turn, read over the link; the rest whole on every rank"
          : "caches: whole on every rank, since all heads attend the same keys");
  const std::vector<model::HeldWeights>& weights = best.memory.weights;
  const bool cuts_head = std::any_of(weights.begin(), weights.end(), [](const model::HeldWeights& held) {
    return held.kind == "head" && held.bytes < held.of;
  });
  if (cuts_head) {
    why.push_back(fmt::format("head: {} of {} tokens of the vocabulary on each rank; a gather of their logits a step",
                              c.vocab_size / world, c.vocab_size));
  }
  why.push_back(fmt::format("embedding, {}router, maps of the input, compressors, indexers: whole on every rank",
                            cuts_head ? "" : "head, "));
  const auto us = [](const Candidate& other) { return other.decode.us(); };
  const Candidate *next = nullptr, *unwritten = nullptr;
  for (const Candidate& other : plan.candidates) {
    if (&other == &best || !other.fits) continue;
    const Candidate*& place = other.plan.is_written() ? next : unwritten;
    if (place == nullptr || us(other) < us(*place)) place = &other;
  }
  if (best.fits && next != nullptr) {
    why.push_back(
        fmt::format("chosen for the shortest decode step of what is written and fits: {:.2f} ms, next \"{}\" "
                    "{:.2f}",
                    us(best) / 1e3, next->plan.name(), us(*next) / 1e3));
  } else if (best.fits) {
    why.push_back("the only plan that is written and fits");
  } else {
    why.push_back("no written plan fits; this one needs least");
  }
  if (const std::string prompts = faster_prompts(plan); !prompts.empty()) why.push_back(prompts);
  if (unwritten != nullptr && us(*unwritten) < us(best)) {
    why.push_back(
        fmt::format("faster once it is written: \"{}\", {:.2f} ms", unwritten->plan.name(), us(*unwritten) / 1e3));
  }
  return why;
}

}  // namespace

std::string_view rank_split_name(AttentionSplit attention, ExpertSplit experts) {
  if (attention == AttentionSplit::kWhole) return experts == ExpertSplit::kById ? "experts" : "experts-width";
  return experts == ExpertSplit::kById ? "heads" : "width";
}

Gpus parse_gpus(std::string_view text) {
  Gpus gpus;
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::string_view name = lower;
  if (const size_t x = name.find('x'); x != std::string_view::npos && x > 0 && name[0] >= '0' && name[0] <= '9') {
    const auto [end, error] = std::from_chars(name.data(), name.data() + x, gpus.count);
    if (error != std::errc() || end != name.data() + x) fail_gpus(text);
    name.remove_prefix(x + 1);
  }
  const auto all = targets();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Target& target) { return target.name == name; });
  if (found == all.end() || gpus.count < 1 || gpus.count > kMostGpus) fail_gpus(text);
  gpus.target = &*found;
  return gpus;
}

MachinePlan plan_machine(const StoredModel& model, const Gpus& gpus, const ServingLoad& load,
                         const PlanChoice& choice) {
  check_load(model.config, load);
  MachinePlan out;
  out.gpus = gpus, out.load = load, out.config = model.config;
  for (ParallelPlan& plan : plans_on(*gpus.target, model.config, gpus.count)) {
    const uint64_t capacity = out.capacity_bytes();
    std::string own_heads;
    if (plan.attention == AttentionSplit::kByGroup && plan.world > 1 && plan.is_written()) {
      own_heads = why_own_heads(model, plan, *gpus.target, capacity, load);
      plan.keeps_all_heads = own_heads.empty();
    }
    Candidate c = held(model, plan, *gpus.target, capacity, load);
    if (plan.keeps_all_heads && !c.fits) {
      plan.keeps_all_heads = false;  // what is asked for comes first
      const uint64_t with_all = c.needed_bytes;
      c = held(model, plan, *gpus.target, capacity, load);
      const uint64_t left = c.fits ? capacity - c.needed_bytes : 0;
      own_heads = fmt::format("have no room: {:.2f} GB more, and the load leaves {:.2f}",
                              static_cast<double>(with_all - c.needed_bytes) / 1e9, static_cast<double>(left) / 1e9);
    }
    c.own_heads = std::move(own_heads);
    c.decode = step_cost(model, plan, *gpus.target, {load.sequences, 1, load.context - 1, load.precision.input});
    c.chunk = std::min(load.step_tokens, load.context);
    c.prefill = step_cost(model, plan, *gpus.target, {1, c.chunk, (load.context - c.chunk) / 2, load.precision.input});
    out.candidates.push_back(std::move(c));
  }
  std::optional<size_t> best;
  for (size_t i = 0; i < out.candidates.size(); ++i) {
    const Candidate& c = out.candidates[i];
    if (!choice.allows(c.plan)) continue;
    const auto is_better = [&](const Candidate& other) {
      if (c.fits != other.fits) return c.fits;
      return c.fits ? c.decode.us() < other.decode.us() : c.needed_bytes < other.needed_bytes;
    };
    if (!best || is_better(out.candidates[*best])) best = i;
  }
  if (!best) fail(ErrorCode::kUnsupported, "no plan of these GPUs is cut as asked");
  out.chosen = *best;
  out.why = reasons(out);
  if (const std::string kernels = kernels_of(model, out); !kernels.empty()) out.why.push_back(kernels);
  if (!out.best().fits) out.advice = advice_for(model, out);
  return out;
}

MachinePlan plan_ranks(const StoredModel& model, int64_t world, std::string_view gpu_name, uint64_t memory_bytes,
                       ServingLoad load, const PlanChoice& choice) {
  load.context = std::clamp<int64_t>(load.context, 1, model.config.max_positions);
  load.longest = std::clamp<int64_t>(load.longest, 0, model.config.max_positions);
  load.step_tokens = std::clamp<int64_t>(load.step_tokens, 1, kMostStepTokens);
  load.sequences = std::clamp<int64_t>(load.sequences, 1, load.step_tokens);
  const Target* target = target_of_gpu(gpu_name);
  return plan_machine(model, {world, target != nullptr ? target : &target_of("h200"), memory_bytes}, load, choice);
}

}  // namespace tessera::bench
