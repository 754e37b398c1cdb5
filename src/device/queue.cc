// SPDX-License-Identifier: Apache-2.0
#include "device/queue.h"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace tessera::device {

Queue::Queue(int num_threads) : num_threads_(num_threads > 0 ? num_threads : std::max(1, omp_get_num_procs())) {}

void Queue::parallel_for(int64_t count, int64_t grain, RangeFunction function) {
  if (count <= 0) return;
  const int64_t useful = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int num_parts = static_cast<int>(std::min<int64_t>(num_threads_, useful));
  if (num_parts == 1) {
    function(0, count);
    return;
  }
  std::exception_ptr first_error;
  std::mutex error_lock;
#pragma omp parallel num_threads(num_parts)
  {
    // The runtime may give fewer threads than asked, so the cut follows the real number.
    const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
    const int64_t begin = count * rank / team, end = count * (rank + 1) / team;
    try {
      if (begin < end) function(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> hold(error_lock);
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace tessera::device
