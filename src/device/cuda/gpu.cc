// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/gpu.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace tessera::device::cuda {

std::optional<GpuDevice> find_gpu(int ordinal, std::string& why_not) {
  int count = 0;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && ordinal >= count) {
    why_not = fmt::format("GPU {} of {}", ordinal, count);
    return std::nullopt;
  }
  cudaDeviceProp properties{};
  if (code == cudaSuccess) code = cudaGetDeviceProperties(&properties, ordinal);
  if (code != cudaSuccess) {
    cudaGetLastError();  // what was reported here shall not surface in a later call
    why_not = fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code));
    return std::nullopt;
  }
  return GpuDevice{properties.name, properties.major, properties.minor, properties.totalGlobalMem};
}

}  // namespace tessera::device::cuda
