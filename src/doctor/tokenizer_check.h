// SPDX-License-Identifier: Apache-2.0
#pragma once
// Does tokenizer.json belong to these weights, as far as the files themselves tell?
#include <optional>
#include <string>
#include <vector>

#include "doctor/finding.h"
#include "model/config.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::doctor {

struct TokenizerReport {
  std::optional<text::Tokenizer> tokenizer;  // nothing where it is missing or can't be read
  std::vector<Finding> findings;
};

TokenizerReport check_tokenizer(const std::string& directory, const model::Config& config);

// The sample that every DeepSeek-V4 and the bundled model know by heart: the begin token and the first verses of
// Genesis (King James Version, in the public domain).
std::string builtin_sample();

}  // namespace tessera::doctor
