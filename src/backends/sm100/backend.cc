// SPDX-License-Identifier: Apache-2.0
// Datacenter Blackwell (compute capability 10.0 and 10.3: B200, B300): NVFP4 maps and experts with NVFP4 inputs on its
// tensor cores. All else is the portable backend's.
#include <fmt/format.h>

#include "backends/sm100/kernels.h"
#include "backends/sm100/packed_tiles.h"

namespace tessera::backends {

extern const ops::Backend cuda_backend;

namespace {

using namespace tessera::ops;

// The kernels are for 10.0 and 10.3 alone; with the CMake option TESSERA_SM100_EMULATED for a Hopper GPU alone. The
// emulated GPU of decision 0019 has every instruction that ptx/ has.
bool available(const device::Machine& machine, std::string& why_not) {
  const device::GpuDevice& gpu = *machine.gpu;
#ifdef TESSERA_SM100_EMULATED
  constexpr const char* kNeeded = "9.0 (this build has tcgen05 in software)";
  if (gpu.compute_major == 9) return true;
#else
  constexpr const char* kNeeded = "10.0 or 10.3 (Blackwell B200, B300)";
  if (gpu.compute_major == 10 && (gpu.compute_minor == 0 || gpu.compute_minor == 3)) return true;
#endif
  why_not = fmt::format("needs compute capability {}, found {}.{}", kNeeded, gpu.compute_major, gpu.compute_minor);
  return false;
}

template <class Desc>
const PackedLayout* packed_layout(const Desc&) {
  return sm100::packed_tiles();
}

constexpr Variant<Linear> kLinear[] = {
    {"tcgen05", sm100::linear_supports, packed_layout<Linear::Desc>, sm100::linear_workspace, sm100::linear}};
constexpr Variant<MoeExperts> kMoeExperts[] = {{"tcgen05", sm100::moe_experts_supports, packed_layout<MoeExperts::Desc>,
                                                sm100::moe_experts_workspace, sm100::moe_experts}};
constexpr Variant<LinearGroup> kLinearGroup[] = {{"tcgen05", sm100::linear_group_supports,
                                                  packed_layout<LinearGroup::Desc>, sm100::linear_group_workspace,
                                                  sm100::linear_group}};

}  // namespace

extern constinit const Backend sm100_backend = {
    .name = "sm100",
    .available = available,
    .verification = Verification::kEmulated,
    .variants = make_variants(kLinear, kMoeExperts, kLinearGroup),
    .is_on_gpu = true,
    .extends = &cuda_backend,
};

}  // namespace tessera::backends
