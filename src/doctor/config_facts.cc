// SPDX-License-Identifier: Apache-2.0
#include "doctor/config_facts.h"

#include <fmt/format.h>

#include <functional>

namespace tessera::doctor {

namespace {

struct Fact {
  const char* field;
  double usual;
  std::function<double(const model::Config&)> get;
  std::function<void(model::Config&, double)> set;
};

const std::vector<Fact>& facts() {
  using model::Config;
  static const std::vector<Fact> table = {
      {"rope_theta", 10000, [](const Config& c) { return c.rope_theta; },
       [](Config& c, double x) { c.rope_theta = x; }},
      {"compress_rope_theta", 160000, [](const Config& c) { return c.compress_rope_theta; },
       [](Config& c, double x) { c.compress_rope_theta = x; }},
      {"rope_scaling.factor", 16, [](const Config& c) { return c.yarn.factor; },
       [](Config& c, double x) { c.yarn.factor = x; }},
      {"rope_scaling.beta_fast", 32, [](const Config& c) { return c.yarn.beta_fast; },
       [](Config& c, double x) { c.yarn.beta_fast = x; }},
      {"rope_scaling.beta_slow", 1, [](const Config& c) { return c.yarn.beta_slow; },
       [](Config& c, double x) { c.yarn.beta_slow = x; }},
      {"swiglu_limit", 10, [](const Config& c) { return c.swiglu_limit; },
       [](Config& c, double x) { c.swiglu_limit = x; }},
      {"norm_topk_prob", 1, [](const Config& c) { return c.norm_topk_prob ? 1.0 : 0.0; },
       [](Config& c, double x) { c.norm_topk_prob = x != 0; }},
      {"hc_sinkhorn_iters", 20, [](const Config& c) { return static_cast<double>(c.hc_sinkhorn_iters); },
       [](Config& c, double x) { c.hc_sinkhorn_iters = static_cast<int64_t>(x); }},
      {"hc_eps", 1e-6, [](const Config& c) { return c.hc_eps; }, [](Config& c, double x) { c.hc_eps = x; }},
      {"rms_norm_eps", 1e-6, [](const Config& c) { return c.rms_norm_eps; },
       [](Config& c, double x) { c.rms_norm_eps = x; }},
  };
  return table;
}

}  // namespace

std::vector<ConfigHypothesis> config_hypotheses(const model::Config& config) {
  std::vector<ConfigHypothesis> out;
  for (const Fact& fact : facts()) {
    const double found = fact.get(config);
    if (found == fact.usual) continue;
    out.push_back({fact.field, fmt::format("{}", found), fmt::format("{}", fact.usual), config});
    fact.set(out.back().config, fact.usual);
  }
  // Flash scales routed experts by 1.5, Pro by 2.5.
  if (config.routed_scaling_factor != 1.5 && config.routed_scaling_factor != 2.5) {
    for (const double usual : {1.5, 2.5}) {
      out.push_back(
          {"routed_scaling_factor", fmt::format("{}", config.routed_scaling_factor), fmt::format("{}", usual), config});
      out.back().config.routed_scaling_factor = usual;
    }
  }
  return out;
}

}  // namespace tessera::doctor
