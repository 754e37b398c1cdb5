// SPDX-License-Identifier: Apache-2.0
#include "device/executor.h"

#include "base/error.h"
#include "device/gpu_executor.h"

namespace tessera::device {

namespace {

class CpuExecutor final : public Executor {
 public:
  explicit CpuExecutor(int num_threads) : queue_(num_threads, placement_) {}
  Queue& queue() override { return queue_; }
  MemorySpace& memory() override { return host_memory(); }
  MemorySpace& staging() override { return host_memory(); }
  void synchronize() override {}
  InterleavedMemory interleave() override { return placement_.interleave(); }
  bool can_record() const override { return false; }

 private:
  std::unique_ptr<Recording> record_call(void (*)(void*), void*) override {
    fail(ErrorCode::kInternal, "a CPU records nothing");
  }

  CpuPlacement placement_;
  Queue queue_;
};

class EndOfQueue final : public QueuePoint {
 public:
  explicit EndOfQueue(Executor& executor) : executor_(executor) {}
  void set() override {}
  void wait() override { executor_.synchronize(); }

 private:
  Executor& executor_;
};

}  // namespace

std::unique_ptr<QueuePoint> Executor::make_point() {
  return std::make_unique<EndOfQueue>(*this);
}

std::unique_ptr<Recording> Executor::record_by_name(void (*call)(void*), void* object) {
  struct Scope {
    explicit Scope(Queue& of) : queue(of) { queue.begin_recording(); }
    ~Scope() { queue.end_recording(); }
    Queue& queue;
  };
  const Scope scope(queue());
  try {
    std::unique_ptr<Recording> recording = record_call(call, object);
    queue().refuse_noted();
    return recording;
  } catch (const Error& error) {
    fail(error.code(), "while recording " + queue().op_being_recorded() + ": " + error.what());
  }
}

std::unique_ptr<Executor> make_executor(const Machine& machine, int num_threads) {
  if (machine.gpu.has_value()) return make_gpu_executor(*machine.gpu);
  return std::make_unique<CpuExecutor>(num_threads);
}

}  // namespace tessera::device
