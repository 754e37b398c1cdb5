// SPDX-License-Identifier: Apache-2.0
#pragma once
// A GPU's queue: a CUDA stream. Work runs in the order in which it was queued; events order queues among each other.
#include <cuda_runtime_api.h>

#include "device/queue.h"

namespace tessera::device::cuda {

class StreamQueue final : public Queue {
 public:
  // A stream of the `ordinal`-th GPU, which becomes the calling thread's current one. Throws kDeviceError.
  explicit StreamQueue(int ordinal = 0);
  // A stream of that GPU which somebody else made, and destroys after this. No kernel of ours begins there before the
  // one before has ended: what ours read before they wait, a step's inputs, kernels of the stream's owner may have
  // made.
  StreamQueue(int ordinal, cudaStream_t borrowed);
  ~StreamQueue() override;
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream()); }
  // Waits for all that was queued; throws kDeviceError where some of it failed.
  void synchronize() const;

 protected:
  void check_recording() const override;

 private:
  bool is_owned_;
};

// A point of a queue.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const StreamQueue& queue);
  // What `queue` gets from now on starts after the point.
  void hold_back(const StreamQueue& queue) const;
  // The calling thread waits for the point.
  void wait() const;
  bool has_passed() const;
  // Time between two points that were reached.
  static float milliseconds_between(const Event& first, const Event& second);

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace tessera::device::cuda
