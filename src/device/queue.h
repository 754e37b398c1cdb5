// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where work runs, in order. On a CPU a queue is a team of threads and calls finish before they return.
#include <cstdint>

#include "device/thread_pool.h"

namespace tessera::device {

class Queue {
 public:
  // num_threads 0: one per core that this process may use (Machine::num_cores).
  explicit Queue(int num_threads = 0);
  int num_threads() const { return pool_.num_threads(); }

  // Calls function(begin, end) on parts of [0, count) in an unspecified order, from several threads, and returns when
  // all are done. `grain` is the fewest items worth a part. Results must not depend on how the range is cut: each
  // item writes its own output. The first exception of any part is thrown again here. One caller at a time.
  void parallel_for(int64_t count, int64_t grain, RangeFunction function);

 private:
  ThreadPool pool_;
};

}  // namespace tessera::device
