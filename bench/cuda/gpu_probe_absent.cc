// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"
#include "bench/ops/probe.h"

namespace tessera::bench {

std::unique_ptr<Probe> make_gpu_probe(const device::GpuDevice&, device::Executor&) {
  fail(ErrorCode::kUnsupported, "this build is without CUDA");
}

}  // namespace tessera::bench
