// SPDX-License-Identifier: Apache-2.0
#include "doctor/trial.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::doctor {

namespace {

bool touches(const RepairPlan& plan, size_t layer) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  const auto at = plan.by_tensor().lower_bound(prefix);
  return at != plan.by_tensor().end() && at->first.starts_with(prefix);
}

device::Tensor copy_of(const device::Tensor& source) {
  device::Tensor copy(source.view().dtype, source.view().shape);
  std::memcpy(copy.view().data, source.view().data, static_cast<size_t>(source.view().num_bytes()));
  return copy;
}

}  // namespace

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value / static_cast<double>(values.size());
  return sum;
}

Comparison compare(const std::vector<double>& before, const std::vector<double>& after) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  Comparison out{mean(before), mean(after), 0, 0};
  if (!std::isfinite(out.before) || !std::isfinite(out.after)) {
    out.gain = std::isfinite(out.after) ? kInfinite : std::isfinite(out.before) ? -kInfinite : 0;
    return out;
  }
  out.gain = out.before - out.after;
  double square = 0;
  const double n = static_cast<double>(before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    const double off = before[i] - after[i] - out.gain;
    square += off * off;
  }
  out.error = std::sqrt(square / (n * std::max(n - 1, 1.0)));
  return out;
}

Trials::Trials(const checkpoint::Checkpoint& checkpoint, const model::Config& config, LayerStack& stack,
               const std::vector<device::Tensor>& inputs, std::vector<int32_t> ids)
    : config_(config),
      stack_(stack),
      inputs_(inputs),
      ids_(std::move(ids)),
      plain_(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound),
      edited_(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound) {}

std::vector<double> Trials::run(const RepairPlan& plan) {
  const size_t first = static_cast<size_t>(plan.first_layer(config_.num_layers));
  const RepairEdit edit(plan, plain_);
  edited_.set_edit(&edit);
  const device::Tensor streams = copy_of(inputs_[first]);
  for (size_t layer = first; layer < stack_.num_layers(); ++layer) {
    if (touches(plan, layer)) {
      stack_.run_layer_from(edited_, layer, streams);
    } else {
      stack_.run_layer(layer, streams, nullptr);
    }
  }
  edited_.set_edit(nullptr);
  return surprises(stack_.logits(streams, nullptr), ids_, config_.vocab_size);
}

}  // namespace tessera::doctor
