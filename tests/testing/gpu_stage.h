// SPDX-License-Identifier: Apache-2.0
#pragma once
// The GPU on which tests run a GPU's variants. Without CUDA in the build there is none.
#include <cstdint>
#include <optional>
#include <string>

#include "device/gpu_facts.h"
#include "verify/stage.h"

namespace tessera::testing {

// An emulated GPU is thousands of times slower: tests give it fewer rows.
#ifdef TESSERA_CUDA_EMULATED
constexpr bool kGpuIsEmulated = true;
#else
constexpr bool kGpuIsEmulated = false;
#endif

// The GPU that tests use; none: `why_not` says why.
std::optional<device::GpuDevice> find_test_gpu(std::string& why_not);
// Where arrays are staged on it.
verify::StageMemory& gpu_stage_memory();
// What an emulated GPU does by chance from now on follows from `seed`; another GPU does not care.
void seed_test_gpu(uint32_t seed);

}  // namespace tessera::testing
