// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls of the emulated GPU's runtime that fail on purpose, so that tests can see what becomes of the work around them.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::device::emulated {

inline constexpr int64_t kForEver = INT64_MAX;

// Which calls fail. Those that give something back (cudaFree..., cuda...Destroy, cudaStreamEndCapture) do so and then
// say that they failed, as CUDA's do when they tell of earlier work; all others have done nothing.
struct Fault {
  int64_t nth = 1;    // of the calls from now on; 1 is the next
  int64_t count = 1;  // that many in a row. kForEver: the GPU is lost, and with it all that was queued
  cudaError_t code = cudaErrorLaunchFailure;
  std::string_view only{};  // calls of which the name begins so; others do not count. Outlives the fault
};

// Arms one fault in place of the last one.
void arm(const Fault& fault);
// From now on no call fails. Calls go on to be counted.
void disarm();
// Since arm() or disarm() was called last, of calls of which the name begins so.
int64_t num_calls(std::string_view prefix = {});
// The first call that failed since then; empty: none did.
std::string failed_call();

// What `call` is to return: asked by the runtime's functions, once each. `is_lost`: nothing that was queued will run.
cudaError_t fault_of(std::string_view call, bool& is_lost);

}  // namespace tessera::device::emulated
