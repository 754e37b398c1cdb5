// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/step_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "bench/plan/step_layer.h"

namespace tessera::bench {

namespace {

template <class Value>
double sum_of(const std::vector<CostPart>& parts, Value CostPart::*value) {
  double sum = 0;
  for (const CostPart& part : parts) sum += part.*value;
  return sum;
}

}  // namespace

double LayerCost::us() const {
  return sum_of(parts, &CostPart::us);
}

double LayerCost::limit_us() const {
  return sum_of(parts, &CostPart::limit_us);
}

double StepCost::us() const {
  return sum_of(parts(), &CostPart::us);
}

double StepCost::limit_us() const {
  return sum_of(parts(), &CostPart::limit_us);
}

std::vector<CostPart> StepCost::parts() const {
  std::vector<CostPart> all;
  std::vector<double> longest;  // whose bound stands for the part
  for (const LayerCost& layer : layers) {
    const auto count = static_cast<double>(layer.count);
    for (const CostPart& part : layer.parts) {
      auto at = std::find_if(all.begin(), all.end(), [&](const CostPart& p) { return p.name == part.name; });
      if (at == all.end()) {
        at = all.emplace(at);
        at->name = part.name;
        longest.push_back(0);
      }
      at->us += count * part.us, at->limit_us += count * part.limit_us;
      at->bytes += count * part.bytes, at->flops += count * part.flops;
      at->received_bytes += count * part.received_bytes;
      double& most = longest[static_cast<size_t>(at - all.begin())];
      if (count * part.us > most || at->bound.empty()) most = count * part.us, at->bound = part.bound;
    }
  }
  return all;
}

LayerCost layer_cost(const model::StoredModel& model, const model::ParallelPlan& plan, const Target& target,
                     const StepLoad& load, int64_t layer) {
  const int64_t ratio = model.config.compress_ratios[static_cast<size_t>(layer)];
  StepLayer costs(model, plan, target, load, fmt::format("layers.{}.", layer));
  costs.attention(ratio);
  costs.experts();
  costs.sums(ratio);
  return {ratio == 0 ? "window" : fmt::format("ratio {}", ratio), 1, costs.take()};
}

StepCost step_cost(const model::StoredModel& model, const model::ParallelPlan& plan, const Target& target,
                   const StepLoad& load) {
  StepCost step;
  std::map<int64_t, size_t> kinds;  // by ratio, where in `step`
  for (int64_t layer = 0; layer < model.config.num_layers; ++layer) {
    const auto [at, is_new] =
        kinds.try_emplace(model.config.compress_ratios[static_cast<size_t>(layer)], step.layers.size());
    if (is_new) {
      step.layers.push_back(layer_cost(model, plan, target, load, layer));
    } else {
      ++step.layers[at->second].count;
    }
  }
  StepLayer ends(model, plan, target, load, "");
  ends.ends();
  step.layers.push_back({"embedding, head, drawing", 1, ends.take()});
  return step;
}

}  // namespace tessera::bench
