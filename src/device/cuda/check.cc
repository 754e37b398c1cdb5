// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/check.h"

#include <fmt/format.h>

#include <string_view>

#include "base/error.h"
#include "device/launch_observer.h"

namespace tessera::device::cuda {

void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) {
    // A kernel's launch is told by the kernel's name alone (backends/cuda_common/launch.cuh), other calls as written.
    LaunchObserver* const observer = LaunchObserver::of_this_thread();
    if (observer != nullptr && std::string_view(call).find('(') == std::string_view::npos) observer->launched(call);
    return;
  }
  cudaGetLastError();  // it is told here, and shall not surface in a later call again
  // The path from src/ on: where the program was built is nobody's business.
  const std::string_view path = file;
  const size_t source = path.rfind("src/");
  fail(code == cudaErrorMemoryAllocation ? ErrorCode::kResourceExhausted : ErrorCode::kDeviceError,
       fmt::format("{}:{}: {}: {} ({})", source == std::string_view::npos ? path : path.substr(source), line, call,
                   cudaGetErrorName(code), cudaGetErrorString(code)));
}

}  // namespace tessera::device::cuda
