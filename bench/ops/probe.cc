// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/probe.h"

namespace tessera::bench {

namespace {

class CpuProbe final : public Probe {
 public:
  CpuProbe(const device::Machine& machine, device::Executor& executor) : machine_(machine), queue_(executor.queue()) {}
  void read(const void* data, int64_t bytes) override { sink_ = sink_ ^ read_bytes(data, bytes, queue_); }
  Ceilings ceilings(const void* data, int64_t bytes) override {
    return measure_ceilings(machine_, data, bytes, queue_);
  }

 private:
  const device::Machine machine_;
  device::Queue& queue_;
  volatile uint64_t sink_ = 0;
};

}  // namespace

std::unique_ptr<Probe> make_probe(const device::Machine& machine, device::Executor& executor) {
  if (machine.gpu.has_value()) return make_gpu_probe(*machine.gpu, executor);
  return std::make_unique<CpuProbe>(machine, executor);
}

}  // namespace tessera::bench
