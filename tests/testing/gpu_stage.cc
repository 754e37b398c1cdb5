// SPDX-License-Identifier: Apache-2.0
#include "testing/gpu_stage.h"

#include "device/gpu_executor.h"
#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/capability.h"
#endif

namespace tessera::testing {

std::optional<device::GpuDevice> find_test_gpu(std::string& why_not) {
  if (kGpuIsEmulated) return device::find_gpu(0, why_not);  // it may say another architecture than before
  static std::string reason;
  static const std::optional<device::GpuDevice> found = device::find_gpu(0, reason);
  why_not = reason;
  return found;
}

verify::StageMemory& gpu_stage_memory() {
  std::string why_not;
  static const std::unique_ptr<device::Executor> executor = device::make_gpu_executor(find_test_gpu(why_not).value());
  static verify::StageMemory memory(*executor);
  return memory;
}

void seed_test_gpu([[maybe_unused]] uint32_t seed) {
#ifdef TESSERA_CUDA_EMULATED
  device::emulated::seed_chance(seed);
#endif
}

}  // namespace tessera::testing
