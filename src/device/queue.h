// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where work runs, in order. On a CPU a queue is a team of threads and calls finish before they return; on a GPU it is
// a stream (device/cuda/stream_queue.h), calls return when their work is queued, and addresses are the GPU's.
#include <cstdint>
#include <string>

#include "device/cpu_placement.h"
#include "device/thread_pool.h"

namespace tessera::device {

class Queue {
 public:
  // num_threads 0: one per processor that this process may use (Machine::num_cores).
  explicit Queue(int num_threads = 0);
  // The same with each thread where `placement` wants it: for work that lasts and has the machine to itself.
  Queue(int num_threads, const CpuPlacement& placement);
  virtual ~Queue() = default;
  int num_threads() const { return pool_.num_threads(); }
  // The cudaStream_t of a GPU's queue; null on a CPU.
  void* stream() const { return stream_; }
  // Whether a kernel's blocks may be put in place before the kernel before it has ended (compute capability 9.0 on).
  bool overlaps_kernels() const { return overlaps_kernels_; }

  // Calls function(begin, end) on parts of [0, count) in an unspecified order, from several threads, and returns when
  // all are done. `grain` is the fewest items worth a part. Results must not depend on how the range is cut: each
  // item writes its own output. The first exception of any part is thrown again here. One caller at a time.
  void parallel_for(int64_t count, int64_t grain, RangeFunction function);

  // What is being recorded (Executor::record), so that a call that can't be is told by name. `where` may be null;
  // strings outlive the recording.
  struct OpName {
    const char* op = nullptr;
    const char* variant = nullptr;
    const char* where = nullptr;  // "layers.3.attn.wq_a"
  };
  void begin_op(const OpName& op) {
    if (is_recording_) op_ = op, is_in_op_ = true;
  }
  // Throws kDeviceError where what was queued since begin_op() can't be recorded and did not say so.
  void end_op() {
    if (!is_recording_) return;
    refuse_noted();
    check_recording();
    is_in_op_ = false;
  }
  void begin_recording();
  void end_recording() { is_recording_ = false; }
  bool is_recording() const { return is_recording_; }
  // The op that is being queued, or the last one: "layers.3.attn.wq_a (linear, mma)", "the step, after ...".
  std::string op_being_recorded() const;
  // For what a recorded step must not do. The first throws kDeviceError while recording; the second, for what must not
  // throw, lets the next end_op() or refuse_noted() do so and returns whether it will.
  void refuse_while_recording(const char* what) const;
  bool note_while_recording(const char* what) noexcept;
  void refuse_noted() const;

 protected:
  // A GPU's queue; its host work runs on the calling thread.
  Queue(void* stream, bool overlaps_kernels) : pool_(1), stream_(stream), overlaps_kernels_(overlaps_kernels) {}

  // Throws kDeviceError where the recording was spoilt by a call that nobody checked.
  virtual void check_recording() const {}

 private:
  OpName op_;
  const char* noted_ = nullptr;
  bool is_recording_ = false, is_in_op_ = false;
  ThreadPool pool_;
  void* stream_ = nullptr;
  bool overlaps_kernels_ = false;
};

}  // namespace tessera::device
