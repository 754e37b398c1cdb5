// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ops are held against, measured on the device where they run.
#include <memory>

#include "bench/ops/ceilings.h"
#include "device/executor.h"

namespace tessera::bench {

class Probe {
 public:
  virtual ~Probe() = default;
  // Queues reading every byte once with all that the device has; `data`, in its memory, is aligned to 16 bytes.
  virtual void read(const void* data, int64_t bytes) = 0;
  // `data`: several times the last cache.
  virtual Ceilings ceilings(const void* data, int64_t bytes) = 0;
};

// The executor, which is the machine's, must outlive it.
std::unique_ptr<Probe> make_probe(const device::Machine& machine, device::Executor& executor);

// That of a GPU; throws kUnsupported in a build without CUDA.
std::unique_ptr<Probe> make_gpu_probe(const device::GpuDevice& gpu, device::Executor& executor);

}  // namespace tessera::bench
