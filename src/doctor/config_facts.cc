// SPDX-License-Identifier: Apache-2.0
#include "doctor/config_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace tessera::doctor {

namespace {

struct Fact {
  const char* field;
  std::vector<double> usual;  // of the releases; several where they differ
  std::function<double(const model::Config&)> get;
  std::function<void(model::Config&, double)> set;
  bool is_flag = false;
  bool is_size = false;  // models of another size may have another value
};

const std::vector<Fact>& facts() {
  using model::Config;
  static const std::vector<Fact> table = {
      {"rope_theta",
       {10000},
       [](const Config& c) { return c.rope_theta; },
       [](Config& c, double x) { c.rope_theta = x; }},
      {"compress_rope_theta",
       {160000},
       [](const Config& c) { return c.compress_rope_theta; },
       [](Config& c, double x) { c.compress_rope_theta = x; }},
      {"rope_scaling.factor",
       {16},
       [](const Config& c) { return c.yarn.factor; },
       [](Config& c, double x) { c.yarn.factor = x; }},
      {"rope_scaling.beta_fast",
       {32},
       [](const Config& c) { return c.yarn.beta_fast; },
       [](Config& c, double x) { c.yarn.beta_fast = x; }},
      {"rope_scaling.beta_slow",
       {1},
       [](const Config& c) { return c.yarn.beta_slow; },
       [](Config& c, double x) { c.yarn.beta_slow = x; }},
      {"swiglu_limit",
       {10},
       [](const Config& c) { return c.swiglu_limit; },
       [](Config& c, double x) { c.swiglu_limit = x; }},
      {"norm_topk_prob",
       {1},
       [](const Config& c) { return c.norm_topk_prob ? 1.0 : 0.0; },
       [](Config& c, double x) { c.norm_topk_prob = x != 0; },
       true},
      {"routed_scaling_factor",
       {1.5, 2.5},
       [](const Config& c) { return c.routed_scaling_factor; },
       [](Config& c, double x) { c.routed_scaling_factor = x; }},
      {"sliding_window",
       {128},
       [](const Config& c) { return static_cast<double>(c.sliding_window); },
       [](Config& c, double x) { c.sliding_window = static_cast<int64_t>(x); },
       false,
       true},
      {"index_topk",
       {512, 1024},
       [](const Config& c) { return static_cast<double>(c.index_topk); },
       [](Config& c, double x) { c.index_topk = static_cast<int64_t>(x); },
       false,
       true},
      {"hc_sinkhorn_iters",
       {20},
       [](const Config& c) { return static_cast<double>(c.hc_sinkhorn_iters); },
       [](Config& c, double x) { c.hc_sinkhorn_iters = static_cast<int64_t>(x); }},
      {"hc_eps", {1e-6}, [](const Config& c) { return c.hc_eps; }, [](Config& c, double x) { c.hc_eps = x; }},
      {"rms_norm_eps",
       {1e-6},
       [](const Config& c) { return c.rms_norm_eps; },
       [](Config& c, double x) { c.rms_norm_eps = x; }},
  };
  return table;
}

std::string text_of(const Fact& fact, double value) {
  if (fact.is_flag) return value != 0 ? "true" : "false";
  return fmt::format("{}", value);
}

}  // namespace

std::vector<ConfigHypothesis> config_hypotheses(const model::Config& config) {
  std::vector<ConfigHypothesis> out;
  for (const Fact& fact : facts()) {
    const double found = fact.get(config);
    if (std::find(fact.usual.begin(), fact.usual.end(), found) != fact.usual.end()) continue;
    ConfigHypothesis hypothesis{fact.field, text_of(fact, found), {}, fact.is_size};
    for (const double usual : fact.usual) {
      hypothesis.usual.push_back({text_of(fact, usual), config});
      fact.set(hypothesis.usual.back().config, usual);
    }
    out.push_back(std::move(hypothesis));
  }
  return out;
}

}  // namespace tessera::doctor
