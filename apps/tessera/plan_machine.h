// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera plan --gpus: a model on a machine of several GPUs.
#include <string>

#include "bench/plan/machine_plan.h"

namespace CLI {
class App;
}

namespace tessera::app {

class PlanMachine {
 public:
  // Adds its flags to the verb, which has sub-verbs too.
  explicit PlanMachine(CLI::App& command);
  // Whether any of them was given.
  bool is_asked() const;
  // Throws for the first that was given: `verb`, a sub-verb, has none of them.
  void refuse_beside(const char* verb) const;
  // Prints the report; exit code 4 where no written plan fits.
  int run() const;

 private:
  model::StoredModel stored_model() const;

  const CLI::App& command_;
  std::string model_ = "flash", gpus_, dense_, json_file_;
  bench::ServingLoad load_;
  int64_t context_ = 0;  // 0: not given
};

}  // namespace tessera::app
