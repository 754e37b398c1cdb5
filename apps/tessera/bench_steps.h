// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera bench model with --batches, --gpus or --ranks
#include <string>

#include "bench/e2e/step_bench.h"
#include "model_flags.h"
#include "ranks.h"

namespace tessera::app {

struct BenchSteps {
  bench::StepOptions options;  // device and threads are those of `model`
  RankFlags ranks;
  ModelFlags model;    // --mode, --device and --threads
  std::string record;  // empty: none
  bool is_json = false;
};

// Measures, prints rows as they come (or one JSON object) and writes the record, on rank 0; the others compute. Returns
// the exit code.
int run_bench_steps(BenchSteps bench);

}  // namespace tessera::app
