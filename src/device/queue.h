// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where work runs, in order. On a CPU a queue is a team of threads and calls finish before they return; on a GPU it is
// a stream (device/cuda/stream_queue.h), calls return when their work is queued, and addresses are the GPU's.
#include <cstdint>

#include "device/cpu_placement.h"
#include "device/thread_pool.h"

namespace tessera::device {

class Queue {
 public:
  // num_threads 0: one per processor that this process may use (Machine::num_cores).
  explicit Queue(int num_threads = 0);
  // The same with each thread where `placement` wants it: for work that lasts and has the machine to itself.
  Queue(int num_threads, const CpuPlacement& placement);
  int num_threads() const { return pool_.num_threads(); }
  // The cudaStream_t of a GPU's queue; null on a CPU.
  void* stream() const { return stream_; }
  // Whether a kernel's blocks may be put in place before the kernel before it has ended (compute capability 9.0 on).
  bool overlaps_kernels() const { return overlaps_kernels_; }

  // Calls function(begin, end) on parts of [0, count) in an unspecified order, from several threads, and returns when
  // all are done. `grain` is the fewest items worth a part. Results must not depend on how the range is cut: each
  // item writes its own output. The first exception of any part is thrown again here. One caller at a time.
  void parallel_for(int64_t count, int64_t grain, RangeFunction function);

 protected:
  // A GPU's queue; its host work runs on the calling thread.
  Queue(void* stream, bool overlaps_kernels) : pool_(1), stream_(stream), overlaps_kernels_(overlaps_kernels) {}

 private:
  ThreadPool pool_;
  void* stream_ = nullptr;
  bool overlaps_kernels_ = false;
};

}  // namespace tessera::device
