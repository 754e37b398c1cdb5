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
  std::string field;
  std::string found, usual;
  model::Config config;  // with the usual value
};

// One for each setting that differs.
std::vector<ConfigHypothesis> config_hypotheses(const model::Config& config);

}  // namespace tessera::doctor
