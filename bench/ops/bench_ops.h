// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ops at the shapes of DeepSeek-V4 Flash and Pro, with weights out of cache, beside reading the same bytes.
#include <functional>
#include <string>
#include <vector>

#include "bench/ops/ceilings.h"
#include "bench/ops/timing.h"
#include "ops/precision.h"

namespace tessera::bench {

struct Options {
  std::vector<int64_t> tokens = {1, 4, 64, 256};
  std::string only;  // rows whose name contains this
  ops::InputMode mode = ops::InputMode::kA16;
  int num_threads = 0;
  double seconds = 0.5;  // per row, at least
  std::vector<std::pair<std::string, std::string>> forced;
};

struct Row {
  std::string name, variant;
  int64_t tokens = 0;
  int64_t bytes = 0;  // of weights really read, packed
  int64_t flops = 0;
  Samples time, read_time;  // of the op; of reading as many bytes in the same run
};

struct Report {
  Ceilings ceilings;
  int num_threads = 0;
  std::vector<Row> rows;
};

// `on_row` is called as rows come.
Report run_ops(const Options& options, const std::function<void(const Report&, const Row&)>& on_row);

}  // namespace tessera::bench
