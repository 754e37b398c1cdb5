// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/timing.h"

#include <algorithm>
#include <chrono>

namespace tessera::bench {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Samples::quantile(double share) const {
  if (seconds.empty()) return 0;
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5)];
}

Pair measure_pair(const std::function<void(int64_t)>& a, const std::function<void(int64_t)>& b, int64_t min_runs,
                  double min_seconds) {
  constexpr int64_t kMostRuns = 1000;
  Pair pair;
  a(0), b(1);
  const double begin = seconds_now();
  for (int64_t run = 0; run < kMostRuns && (run < min_runs || seconds_now() - begin < min_seconds); ++run) {
    const double start = seconds_now();
    a(2 * run + 2);
    const double middle = seconds_now();
    b(2 * run + 3);
    pair.a.seconds.push_back(middle - start);
    pair.b.seconds.push_back(seconds_now() - middle);
  }
  return pair;
}

}  // namespace tessera::bench
