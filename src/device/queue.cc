// SPDX-License-Identifier: Apache-2.0
#include "device/queue.h"

#include <algorithm>

#include "device/machine.h"

namespace tessera::device {

namespace {

// Parts per thread: more of them even out cores of unequal speed, fewer cost fewer claims.
constexpr int64_t kPartsPerThread = 2;

int threads_or_default(int num_threads) {
  return num_threads > 0 ? num_threads : usable_cores();
}

}  // namespace

Queue::Queue(int num_threads) : pool_(threads_or_default(num_threads)) {}

Queue::Queue(int num_threads, const CpuPlacement& placement)
    : pool_(threads_or_default(num_threads),
            placement.topology().is_imagined ? std::vector<int>() : placement.pins(num_threads).processors) {}

void Queue::parallel_for(int64_t count, int64_t grain, RangeFunction function) {
  if (count <= 0) return;
  const int64_t useful = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int64_t num_parts = num_threads() == 1 ? 1 : std::min(kPartsPerThread * num_threads(), useful);
  if (num_parts == 1) {
    function(0, count);
  } else {
    pool_.run(count, num_parts, function);
  }
}

}  // namespace tessera::device
