// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work that is recorded once and launched many times as a whole.
#include <cuda_runtime_api.h>

#include "device/cuda/stream_queue.h"

namespace tessera::device::cuda {

class Graph {
 public:
  // Calls work(), which queues on `queue`; what it queues is recorded and not run. A call that can't be recorded (an
  // allocation, a wait) throws kDeviceError and names itself.
  template <class Work>
  Graph(const StreamQueue& queue, Work&& work) : Graph() {
    begin(queue);
    try {
      work();
    } catch (...) {
      abandon(queue);
      throw;
    }
    end(queue);
  }
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Queues the recorded work.
  void launch(const StreamQueue& queue) const;

 private:
  Graph() = default;
  static void begin(const StreamQueue& queue);
  static void abandon(const StreamQueue& queue);
  void end(const StreamQueue& queue);

  cudaGraphExec_t executable_ = nullptr;  // null where nothing was queued
};

}  // namespace tessera::device::cuda
