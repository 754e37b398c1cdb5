// SPDX-License-Identifier: Apache-2.0
// gpu_stage.h in builds without CUDA.
#include "base/error.h"
#include "testing/gpu_stage.h"

namespace tessera::testing {

std::optional<device::GpuDevice> find_test_gpu(std::string& why_not) {
  why_not = "built without CUDA";
  return std::nullopt;
}

void GpuStage::add(ops::WeightView&) {}
void GpuStage::add(const ops::WeightView*&, int64_t) {}
void GpuStage::add_array(void**, int64_t, Access) {}
void GpuStage::run_staged(void (*)(void*, device::Queue&), void*) {
  fail(ErrorCode::kInternal, "no GPU was found, yet one is used");
}

}  // namespace tessera::testing
