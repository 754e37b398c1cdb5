// SPDX-License-Identifier: Apache-2.0
#pragma once
// GPUs that this build can compute on: the one place that differs between builds with and without CUDA.
#include <memory>
#include <optional>
#include <string>

#include "device/executor.h"

namespace tessera::device {

// The `ordinal`-th GPU that CUDA shows; none where there is no such GPU, no usable driver or no CUDA in this build, and
// then `why_not` says so. Never throws for what the driver does.
std::optional<GpuDevice> find_gpu(int ordinal, std::string& why_not);

// On a stream of its own, or on `stream`, a cudaStream_t of that GPU that outlives it. Throws kUnsupported in a build
// without CUDA, kDeviceError where the GPU can't be used.
std::unique_ptr<Executor> make_gpu_executor(const GpuDevice& gpu, void* stream = nullptr);

}  // namespace tessera::device
