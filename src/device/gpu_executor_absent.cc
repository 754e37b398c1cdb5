// SPDX-License-Identifier: Apache-2.0
// gpu_executor.h in builds without CUDA.
#include "base/error.h"
#include "device/gpu_executor.h"

namespace tessera::device {

std::optional<GpuDevice> find_gpu(int, std::string& why_not) {
  why_not = "this program was built without CUDA (cmake --preset cuda)";
  return std::nullopt;
}

std::unique_ptr<Executor> make_gpu_executor(const GpuDevice& gpu, void*) {
  fail(ErrorCode::kUnsupported, gpu.name + ": this program was built without CUDA (cmake --preset cuda)");
}

}  // namespace tessera::device
