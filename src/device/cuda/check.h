// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every call of the CUDA runtime goes through here, so that a failure names the place, the call and CUDA's words.
#include <cuda_runtime_api.h>

namespace tessera::device::cuda {

// Throws kDeviceError, "FILE:LINE: CALL: NAME (WORDS)", unless `code` is cudaSuccess. Errors of work that was queued
// earlier surface in whichever call comes next; CUDA_LAUNCH_BLOCKING=1 makes them surface where they arise.
void check(cudaError_t code, const char* call, const char* file, int line);

}  // namespace tessera::device::cuda

#define TESSERA_CUDA_CHECK(call) ::tessera::device::cuda::check((call), #call, __FILE__, __LINE__)
