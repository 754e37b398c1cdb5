// SPDX-License-Identifier: Apache-2.0
#pragma once
// Repeating a measurement, and what is said of the samples.
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::bench {

double seconds_now();

struct Samples {
  std::vector<double> seconds;
  double quantile(double share) const;  // 0.5: the median
};

// Runs `a` and `b` in turn, once unmeasured, then until each has at least `min_runs` samples and `min_seconds` have
// passed (at most 1000 runs). Pairing keeps their ratio meaningful on a busy machine. The argument counts runs.
struct Pair {
  Samples a, b;
};
Pair measure_pair(const std::function<void(int64_t)>& a, const std::function<void(int64_t)>& b, int64_t min_runs,
                  double min_seconds);

}  // namespace tessera::bench
