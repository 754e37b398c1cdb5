// SPDX-License-Identifier: Apache-2.0
#pragma once
// What Tessera wants to reach on one H200, measured in one run: ops alone and together, and recorded layers by kernel.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/e2e/layer_bench.h"
#include "bench/ops/bench_ops.h"

namespace tessera::bench {

struct TargetOptions {
  std::string device = "cpu";  // device::machine_of
  std::string only;            // ops' rows whose name contains this, and layers if "layer" or a kind's row contains it
  double seconds = 0.1;        // per row, at least
  bool is_small = false;       // the shape "small" and few tokens: whether it runs, not how fast
  std::vector<std::pair<std::string, std::string>> forced;
};

// At most one of them is given; none where only a rival's time in the same run would be one.
struct Target {
  double us = 0;             // at most
  double share_of_read = 0;  // at least, of reading as many bytes in the same run
  double tflops = 0;         // at least
};

struct TargetRow {
  std::string part;  // of the table: "experts", "linear, alone", "layer"
  std::string name, variant;
  int64_t tokens = 0, bytes = 0, flops = 0, calls = 1;  // as in Row
  Samples time, read_time;                              // read_time may be empty
  Target target;
  std::vector<LaunchTime> launches;  // of a layer, in order

  double us() const { return time.quantile(0.5) * 1e6; }
  double tflops() const { return static_cast<double>(flops) / time.quantile(0.5) * 1e-12; }
  double share_of_read() const { return read_time.quantile(0.5) / time.quantile(0.5); }
  bool has_target() const { return target.us > 0 || target.share_of_read > 0 || target.tflops > 0; }
  // What was reached over what is wanted: 1 and more is reached. 0 without a target.
  double reached() const;
};

struct TargetReport {
  std::string device;
  bool is_on_gpu = false;
  Ceilings ceilings;
  std::vector<TargetRow> rows;
  double seconds = 0;  // of all
};

// `on_row` is called as rows come. Throws kInvalidArgument where `only` leaves nothing, kResourceExhausted with figures
// where something does not fit.
TargetReport run_targets(const TargetOptions& options, const std::function<void(const TargetRow&)>& on_row);

// "<= 90 us", "read 75 %", "640 TFLOP/s"; empty without one.
std::string to_string(const Target& target);

}  // namespace tessera::bench
