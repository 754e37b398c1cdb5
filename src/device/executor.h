// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a model computes: a queue, the memory that its ops work in, and work recorded once and launched many times.
#include <memory>
#include <type_traits>

#include "device/cpu_placement.h"
#include "device/machine.h"
#include "device/memory_space.h"
#include "device/queue.h"

namespace tessera::device {

// Recorded work.
class Recording {
 public:
  virtual ~Recording() = default;
  // Queues it as a whole.
  virtual void launch() = 0;
};

// A point of what was queued, for who waits for that and not for what comes behind it.
class QueuePoint {
 public:
  virtual ~QueuePoint() = default;
  // The end of all that was queued up to now. Not while a step is recorded.
  virtual void set() = 0;
  // Waits until the point is reached, as synchronize() waits for the whole.
  virtual void wait() = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual Queue& queue() = 0;
  virtual MemorySpace& memory() = 0;
  // Host memory that copies to and from memory() fastest; upload() from it returns before the copy is made, so
  // synchronize() before it changes.
  virtual MemorySpace& staging() = 0;
  // Host memory for what is brought to memory() once, such as weights: not zeroed where it was used before, and it may
  // be released while copies from it are under way.
  virtual MemorySpace& loading() { return host_memory(); }
  // Nothing more is brought: gives back what loading() holds.
  virtual void end_loading() {}
  // Waits for all that was queued. Throws kDeviceError where some of it failed.
  virtual void synchronize() = 0;
  // Where queueing is as good as running: its wait is synchronize(). The executor outlives it.
  virtual std::unique_ptr<QueuePoint> make_point();
  // For while memory() is filled: on a CPU, what the calling thread allocates is spread as its placement says.
  virtual InterleavedMemory interleave() { return {}; }

  // Before a thread's first call after another executor's: what it queues goes to this one's device.
  virtual void make_current() {}

  // False: calling is as good as recording, and record() is not to be used.
  virtual bool can_record() const = 0;
  // Calls work(), which queues; what it queues is recorded and not run. Throws kDeviceError, naming the call and the op
  // that made it ("while recording layers.3.attn.wq_a (linear, mma): a wait can't be recorded"), where it does what
  // can't be recorded: an allocation, a copy from or to the host, a wait, work elsewhere.
  template <class Work>
  std::unique_ptr<Recording> record(Work&& work) {
    return record_by_name([](void* object) { (*static_cast<std::remove_reference_t<Work>*>(object))(); }, &work);
  }

 protected:
  virtual std::unique_ptr<Recording> record_call(void (*call)(void* object), void* object) = 0;

 private:
  std::unique_ptr<Recording> record_by_name(void (*call)(void* object), void* object);
};

// On machine.gpu, or where there is none on the CPU with `num_threads` (Queue's meaning), placed as TESSERA_PLACEMENT
// says. Throws kUnsupported for a GPU in a build without CUDA, kDeviceError where the GPU can't be used.
std::unique_ptr<Executor> make_executor(const Machine& machine, int num_threads);

}  // namespace tessera::device
