// SPDX-License-Identifier: Apache-2.0
#pragma once
// Settings that no tensor's shape betrays, against what every DeepSeek-V4 release has: where config.json says
// otherwise, the usual value is a hypothesis to try on the sample. Source: config.json of deepseek-ai/DeepSeek-V4-Flash
// and -Pro.
#include <string>
#include <vector>

#include "model/config.h"

namespace tessera::doctor {

struct ConfigHypothesis {
  struct Value {
    std::string text;
    model::Config config;  // with this value
  };
  std::string field, found;
  std::vector<Value> usual;  // of the releases; several where they differ
  bool is_size = false;      // a model of another size may have another value: no news by itself
};

// One for each setting that differs.
std::vector<ConfigHypothesis> config_hypotheses(const model::Config& config);

}  // namespace tessera::doctor
