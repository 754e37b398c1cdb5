// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace tessera::engine {

namespace {

constexpr size_t kMaxBias = 1024;

std::optional<std::string> out_of_range(const char* field, double value, double min, double max, const char* expected) {
  if (value >= min && value <= max) return std::nullopt;  // a NaN is not
  return fmt::format("{}: expected {}, found {}", field, expected, value);
}

}  // namespace

std::optional<std::string> find_fault(const SamplingOptions& options, int32_t vocab_size) {
  const model::SamplingParams& p = options.params;
  const auto value = [](float x) { return static_cast<double>(x); };
  const std::optional<std::string> faults[] = {
      out_of_range("temperature", value(p.temperature), 0, 100, "a number from 0 (greedy) to 100"),
      p.top_p > 0 ? out_of_range("top-p", value(p.top_p), 0, 1, "a number above 0, up to 1")
                  : fmt::format("top-p: expected a number above 0, up to 1, found {}", p.top_p),
      out_of_range("min-p", value(p.min_p), 0, 1, "a number from 0 to 1"),
      out_of_range("top-k", p.top_k, 0, 1 << 30, "0 (all) or more"),
      p.repetition_penalty > 0
          ? out_of_range("repetition-penalty", value(p.repetition_penalty), 0, 100, "a number above 0, up to 100")
          : fmt::format("repetition-penalty: expected a number above 0, up to 100, found {}", p.repetition_penalty),
      out_of_range("frequency-penalty", value(p.frequency_penalty), -100, 100, "a number from -100 to 100"),
      out_of_range("presence-penalty", value(p.presence_penalty), -100, 100, "a number from -100 to 100"),
  };
  for (const std::optional<std::string>& fault : faults) {
    if (fault) return fault;
  }
  if (options.logit_bias.size() > kMaxBias) {
    return fmt::format("logit-bias: expected at most {} entries, found {}", kMaxBias, options.logit_bias.size());
  }
  for (const auto& [id, bias] : options.logit_bias) {
    if (id < 0 || id >= vocab_size)
      return fmt::format("logit-bias: expected token ids from 0 to {}, found {}", vocab_size - 1, id);
    if (!std::isfinite(bias)) return fmt::format("logit-bias: expected finite numbers, found {} for {}", bias, id);
  }
  return std::nullopt;
}

Sampler::Sampler(const SamplingOptions& options, int32_t vocab_size) : params_(options.params) {
  for (const auto& [id, bias] : options.logit_bias) {
    bias_ids_.push_back(id);
    bias_values_.push_back(bias);
  }
  has_penalties_ = params_.repetition_penalty != 1 || params_.frequency_penalty != 0 || params_.presence_penalty != 0;
  if (has_penalties_) counts_.resize(static_cast<size_t>(vocab_size));
}

std::optional<model::Draw> Sampler::draw_in_step(int64_t position) const {
  if (has_penalties_ || !bias_ids_.empty()) return std::nullopt;
  return model::Draw{.params = params_, .position = static_cast<uint64_t>(position)};
}

int32_t Sampler::drawn(const model::Draw& draw) {
  if (draw.token < 0)
    fail(ErrorCode::kNotFinite,
         "no token can be drawn: every logit is NaN, minus infinity or of a token that is not allowed");
  return draw.token;
}

void Sampler::observe(int32_t id) {
  if (has_penalties_) ++counts_[static_cast<size_t>(id)];
}

int32_t Sampler::draw(model::Runner& runner, std::span<const float> logits, int64_t position,
                      std::span<const uint32_t> mask) const {
  return runner.sample({.logits = logits,
                        .params = params_,
                        .position = static_cast<uint64_t>(position),
                        .counts = counts_,
                        .bias_ids = bias_ids_,
                        .bias_values = bias_values_,
                        .mask = mask});
}

}  // namespace tessera::engine
