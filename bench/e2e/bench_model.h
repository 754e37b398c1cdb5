// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prefill and decode of one sequence of a real model, at several context lengths.
#include <functional>
#include <string>
#include <vector>

#include "model/load_model.h"

namespace tessera::bench {

struct ModelOptions {
  std::string directory;
  model::LoadOptions load;
  std::vector<int64_t> contexts = {512, 4096};
  int64_t decode_tokens = 64;  // greedy, after each prefill
  int64_t repeats = 5;
};

struct ModelRow {
  int64_t context = 0;
  std::vector<double> prefill_tokens_per_second, decode_tokens_per_second;  // one per repeat
};

// Contexts that the model can't hold are left out. `on_row` is called as rows come.
std::vector<ModelRow> run_model(const ModelOptions& options, const std::function<void(const ModelRow&)>& on_row);

}  // namespace tessera::bench
