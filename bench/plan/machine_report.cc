// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/plan/machine_plan.h"
#include "model/memory_fit.h"

namespace tessera::bench {

namespace {

using nlohmann::ordered_json;

// 1048576 as 1,048,576.
std::string grouped(int64_t value) {
  std::string text = fmt::format("{}", value);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), ",");
  return text;
}

// "1 token", "8,192 tokens".
std::string counted(int64_t count, const char* what) {
  return fmt::format("{} {}{}", grouped(count), what, count == 1 ? "" : "s");
}

std::string gb(uint64_t bytes) {
  return fmt::format("{:.2f}", static_cast<double>(bytes) / 1e9);
}

uint64_t most_sequence_bytes(const MachinePlan& plan) {
  return rank_sequence_bytes(plan.config, plan.best().plan, plan.load.precision, plan.config.max_positions,
                             plan.load.step_tokens);
}

// Sequences of the model's limit beside weights and work.
int64_t longest_room(const MachinePlan& plan) {
  const uint64_t fixed = plan.best().memory.fixed(), capacity = plan.capacity_bytes();
  return fixed < capacity ? static_cast<int64_t>((capacity - fixed) / most_sequence_bytes(plan)) : 0;
}

std::string memory_text(const MachinePlan& plan) {
  const Candidate& c = plan.best();
  const model::RankMemory& memory = c.memory;
  std::string text = "Memory of each rank, GB\n";
  const auto row = [&](const std::string& name, uint64_t bytes, const std::string& note) {
    text += fmt::format("  {:<38} {:>9}  {}\n", name, gb(bytes), note);
  };
  for (const model::HeldWeights& held : memory.weights) {
    const uint64_t stored = held.bytes - held.padding;
    std::string note = stored < held.of      ? fmt::format("of {}", gb(held.of))
                       : stored > held.of    ? fmt::format("all {}, and its own heads' apart", gb(held.of))
                       : plan.gpus.count > 1 ? "whole, on every rank"
                                             : "";
    if (held.padding > 0) {
      note += fmt::format("{}{} of it padding to the kernels' units", note.empty() ? "" : "; ", gb(held.padding));
    }
    row(held.kind, held.bytes, note);
  }
  row("weights", memory.weight_bytes(), "");
  row("work space", memory.step, fmt::format("steps of up to {}", counted(plan.load.step_tokens, "token")));
  row("driver, modules, graphs, communication", memory.runtime, "estimated");
  row("caches", c.sequence_bytes * static_cast<uint64_t>(plan.load.sequences),
      fmt::format("{} of {}, {} GB each", counted(plan.load.sequences, "sequence"), counted(plan.load.context, "token"),
                  gb(c.sequence_bytes)));
  const uint64_t capacity = plan.capacity_bytes();
  row("sum", c.needed_bytes,
      c.fits ? fmt::format("of {}: fits, {} left", gb(capacity), gb(capacity - c.needed_bytes))
             : fmt::format("of {}: DOES NOT FIT, {} missing", gb(capacity), gb(c.needed_bytes - capacity)));
  for (const std::string& line : plan.advice) text += fmt::format("    {}\n", line);

  const int64_t longest = longest_room(plan), limit = plan.config.max_positions;
  text +=
      fmt::format("\nCapacity for caches ({}): {:.0f} bytes a token, and {:.1f} MB a sequence (rings of {})\n",
                  plan.best().plan.shards_entries ? "one copy of entries among the ranks" : "one copy on every rank",
                  memory.token, static_cast<double>(memory.sequence) / 1e6,
                  counted(model::ring_slots(plan.config, plan.load.step_tokens), "token"));
  text += fmt::format("  {:>12} token{} a sequence: room for {} of them, {}\n", grouped(plan.load.context),
                      plan.load.context == 1 ? "" : "s", grouped(c.room), counted(c.room * plan.load.context, "token"));
  if (plan.load.context != limit) {
    text += fmt::format("  {:>12} (the model's limit): room for {}, {}\n", grouped(limit), grouped(longest),
                        counted(longest * limit, "token"));
  }
  text += fmt::format("  four sequences of {} tokens, {} in all: {} GB, {}\n", grouped(limit), grouped(4 * limit),
                      gb(4 * most_sequence_bytes(plan)), longest >= 4 ? "fit" : "do not fit");
  return text;
}

std::string parts_table(const StepCost& step) {
  std::string text = fmt::format("  {:<26} {:>10} {:>6} {:>10} {:>9} {:>9} {:>9}  {}\n", "all layers", "us", "share",
                                 "limit, us", "GB read", "GFLOP", "MB recv", "bound by");
  bool has_added = false;
  for (const CostPart& part : step.parts()) {
    text += fmt::format("  {:<26} {:>10.1f} {:>5.0f}% {:>10.1f} {:>9.3f} {:>9.1f} {:>9.2f}  {}\n", part.name, part.us,
                        100 * part.us / step.us(), part.limit_us, part.bytes / 1e9, part.flops / 1e9,
                        part.received_bytes / 1e6, part.bound);
    has_added = has_added || part.name == kSharedPart;
  }
  if (has_added) {
    text += fmt::format(
        "  ({}: to the launches of the routed ones, which hide some of it; its limit is the whole of "
        "it)\n",
        kSharedPart);
  }
  return text;
}

std::string layers_table(const StepCost& step) {
  std::string text = fmt::format("  {:<26} {:>10} {:>6} {:>10}  {}\n", "layers", "us each", "number", "limit, us",
                                 "longest parts, us");
  for (const LayerCost& layer : step.layers) {
    std::vector<CostPart> parts = layer.parts;
    std::sort(parts.begin(), parts.end(), [](const CostPart& a, const CostPart& b) { return a.us > b.us; });
    std::string longest;
    for (size_t i = 0; i < std::min<size_t>(parts.size(), 3); ++i) {
      longest += fmt::format("{}{} {:.1f}", i == 0 ? "" : ", ", parts[i].name, parts[i].us);
    }
    text += fmt::format("  {:<26} {:>10.1f} {:>6} {:>10.1f}  {}\n", layer.kind, layer.us(), layer.count,
                        layer.limit_us(), longest);
  }
  return text;
}

std::string times_text(const MachinePlan& plan) {
  const Candidate& c = plan.best();
  const ServingLoad& load = plan.load;
  std::string text = fmt::format("Decode step of {} at {}: predicted {:.2f} ms, {:.0f} tokens/s; limit {:.2f} ms\n",
                                 counted(load.sequences, "sequence"), counted(load.context, "token"),
                                 c.decode.us() / 1e3, c.tokens_per_second(load.sequences), c.decode.limit_us() / 1e3);
  text += layers_table(c.decode) + parts_table(c.decode);
  const double prompt_us = c.prefill.us() * static_cast<double>(load.context) / static_cast<double>(c.chunk);
  text += fmt::format(
      "\nPrefill of {} by {}, a step in the middle: predicted {:.1f} ms, {:.0f} tokens/s ({:.0f} a GPU), the "
      "prompt {:.2f} s; limit {:.1f} ms\n",
      counted(load.context, "token"), grouped(c.chunk), c.prefill.us() / 1e3, c.prefill_tokens_per_second(),
      c.prefill_tokens_per_second() / static_cast<double>(plan.gpus.count), prompt_us / 1e6,
      c.prefill.limit_us() / 1e3);
  return text + layers_table(c.prefill) + parts_table(c.prefill);
}

std::string candidates_text(const MachinePlan& plan) {
  std::string text = fmt::format("{:<52} {:>11} {:>11} {:>12} {:>13} {:>9}  {}\n", "Plans", "decode, ms", "sums, ms",
                                 "prefill, ms", "GB of a rank", "sequences", "");
  for (size_t i = 0; i < plan.candidates.size(); ++i) {
    const Candidate& c = plan.candidates[i];
    double sums = 0;
    for (const CostPart& part : c.decode.parts()) sums += part.name == kSumsPart ? part.us : 0;
    const std::string state = !c.plan.is_written() ? "not written" : i == plan.chosen ? "chosen" : "";
    text += fmt::format("  {:<50} {:>11.2f} {:>11.2f} {:>12.1f} {:>13} {:>9}  {}{}{}\n", c.plan.name(),
                        c.decode.us() / 1e3, sums / 1e3, c.prefill.us() / 1e3, gb(c.needed_bytes), grouped(c.room),
                        state, !state.empty() && !c.fits ? ", " : "", c.fits ? "" : "does not fit");
  }
  return text;
}

ordered_json json_of(const CostPart& part) {
  return {{"name", part.name},   {"us", part.us},       {"limit_us", part.limit_us},
          {"bytes", part.bytes}, {"flops", part.flops}, {"received_bytes", part.received_bytes},
          {"bound", part.bound}};
}

ordered_json json_of(const StepCost& step) {
  ordered_json out = {{"us", step.us()}, {"limit_us", step.limit_us()}};
  out["layers"] = ordered_json::array();
  for (const LayerCost& layer : step.layers) {
    ordered_json one = {
        {"kind", layer.kind}, {"count", layer.count}, {"us", layer.us()}, {"limit_us", layer.limit_us()}};
    for (const CostPart& part : layer.parts) one["parts"].push_back(json_of(part));
    out["layers"].push_back(one);
  }
  return out;
}

ordered_json json_of(const MachinePlan& plan, const Candidate& c) {
  ordered_json out = {{"plan", c.plan.name()},
                      {"is_written", c.plan.is_written()},
                      {"fits", c.fits},
                      {"needed_bytes", c.needed_bytes},
                      {"sequence_bytes", c.sequence_bytes},
                      {"room_sequences", c.room},
                      {"room_tokens", c.room * plan.load.context},
                      {"decode_tokens_per_second", c.tokens_per_second(plan.load.sequences)},
                      {"prefill_tokens_per_second", c.prefill_tokens_per_second()}};
  ordered_json memory = {{"work_bytes", c.memory.step},
                         {"runtime_bytes", c.memory.runtime},
                         {"bytes_a_sequence", c.memory.sequence},
                         {"bytes_a_token", c.memory.token}};
  for (const model::HeldWeights& held : c.memory.weights) {
    memory["weights"].push_back(
        {{"kind", held.kind}, {"bytes", held.bytes}, {"of", held.of}, {"padding", held.padding}});
  }
  out["memory"] = memory;
  out["decode"] = json_of(c.decode);
  out["prefill"] = json_of(c.prefill);
  out["prefill"]["tokens"] = c.chunk;
  return out;
}

}  // namespace

std::string machine_plan_text(const MachinePlan& plan, const std::string& model_name) {
  const Target& target = *plan.gpus.target;
  std::string text = fmt::format("{} on {} x {}: {} of {}\n\nPlan: {}\n", model_name, plan.gpus.count, target.gpu,
                                 counted(plan.load.sequences, "sequence"), counted(plan.load.context, "token"),
                                 plan.best().plan.name());
  for (const std::string& line : plan.why) text += fmt::format("  {}\n", line);
  text += "\n" + memory_text(plan) + "\n" + times_text(plan);
  if (plan.candidates.size() > 1) text += "\n" + candidates_text(plan);
  return text +
         "\nPredicted, not measured: kernels as they are written, one after the other, by the GPU's figures (tessera "
         "plan\nkernels --target " +
         std::string(target.name) + "). How far off on an H200: docs/performance/several_gpus.md.\n";
}

std::string machine_plan_json(const MachinePlan& plan, const std::string& model_name) {
  ordered_json out = {{"model", model_name},
                      {"gpu", plan.gpus.target->name},
                      {"gpus", plan.gpus.count},
                      {"context", plan.load.context},
                      {"batch", plan.load.sequences},
                      {"step_tokens", plan.load.step_tokens},
                      {"mode", to_string(plan.load.precision.input)},
                      {"capacity_bytes", plan.capacity_bytes()},
                      {"chosen", plan.chosen},
                      {"fits", plan.best().fits},
                      {"why", plan.why},
                      {"advice", plan.advice},
                      {"longest_sequence_tokens", plan.config.max_positions},
                      {"longest_sequences", longest_room(plan)}};
  out["candidates"] = ordered_json::array();
  for (const Candidate& candidate : plan.candidates) out["candidates"].push_back(json_of(plan, candidate));
  return out.dump(1) + "\n";
}

}  // namespace tessera::bench
