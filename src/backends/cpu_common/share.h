// SPDX-License-Identifier: Apache-2.0
#pragma once
// Unequal pieces of work over a team: whoever is free takes the next one, so neither skewed routing nor a slow core
// leaves the others waiting. Which thread computes a piece never changes its result.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "device/queue.h"

namespace tessera::backends::cpu_common {

// Calls piece(index) for each index in [0, count). `cost` is of all pieces together, in bytes read or in
// multiply-adds / 16, whichever is more: small work is not spread.
template <class Piece>
void share(device::Queue& queue, int64_t count, int64_t cost, const Piece& piece) {
  constexpr int64_t kCostOfThread = 1 << 16;  // about what waking one takes
  const int64_t team = std::min({static_cast<int64_t>(queue.num_threads()), count, cost / kCostOfThread});
  if (team <= 1) {
    for (int64_t i = 0; i < count; ++i) piece(i);
    return;
  }
  std::atomic<int64_t> next = 0;
  queue.parallel_for(team, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      piece(i);
    }
  });
}

}  // namespace tessera::backends::cpu_common
