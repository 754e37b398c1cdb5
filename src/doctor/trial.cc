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

// The first `count` tokens of streams.
device::Tensor first_of(const device::Tensor& source, int64_t count) {
  const Shape& shape = source.view().shape;
  device::Tensor copy(source.view().dtype, {count, shape[1], shape[2]});
  std::memcpy(copy.view().data, source.view().data, static_cast<size_t>(copy.view().num_bytes()));
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

Score score(std::span<const float> logits, std::span<const int32_t> ids, int64_t vocab) {
  Score out{surprises(logits, ids, vocab), 0, 0};
  const double n = static_cast<double>(out.surprises.size());
  double variance = 0;
  for (const Expectation& token : expectations(logits, out.surprises.size(), vocab)) {
    out.expected += token.mean / n, variance += token.variance;
  }
  out.error = std::sqrt(std::max(0.0, variance)) / n;
  return out;
}

Trials::Trials(const checkpoint::Checkpoint& checkpoint, const model::Config& config, LayerStack& stack,
               const std::vector<device::Tensor>& inputs, const device::Tensor& output, std::vector<int32_t> ids)
    : config_(config),
      stack_(stack),
      inputs_(inputs),
      output_(output),
      ids_(std::move(ids)),
      plain_(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound),
      edited_(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound) {}

Score Trials::run(const RepairPlan& plan, int64_t num_tokens) {
  const int64_t all = stack_.num_tokens(), count = num_tokens == 0 ? all : std::min(num_tokens, all);
  const size_t first = static_cast<size_t>(plan.first_layer(config_.num_layers));
  const RepairEdit edit(plan, plain_);
  edited_.set_edit(&edit);
  const auto repairs = [&](const char* name) { return plan.by_tensor().contains(name); };
  const device::Tensor streams = repairs("embed") ? first_of(stack_.embed(edited_), count)
                                                  : first_of(first == inputs_.size() ? output_ : inputs_[first], count);
  for (size_t layer = first; layer < stack_.num_layers(); ++layer) {
    if (touches(plan, layer)) {
      stack_.run_layer_from(edited_, layer, streams);
    } else {
      stack_.run_layer(layer, streams, nullptr);
    }
  }
  Score out =
      score(stack_.logits(edited_, streams), std::span(ids_).first(static_cast<size_t>(count)), config_.vocab_size);
  edited_.set_edit(nullptr);
  return out;
}

}  // namespace tessera::doctor
