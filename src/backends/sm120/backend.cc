// SPDX-License-Identifier: Apache-2.0
// Blackwell without tensor memory (compute capability 12: RTX PRO 6000, RTX 5090, GB10): what block-scaled mma.sync
// makes faster. All else is the portable backend's.
#include <fmt/format.h>

#include "backends/sm120/kernels.h"
#include "backends/sm120/scaled_units.h"

namespace tessera::backends {

extern const ops::Backend cuda_backend;

namespace {

using namespace tessera::ops;

// The kernels are for 12.0 and 12.1 alone; with the CMake option TESSERA_SM120_EMULATED for a Hopper GPU alone. The
// emulated GPU of decision 0019 has every instruction that ptx/ has.
bool available(const device::Machine& machine, std::string& why_not) {
  const device::GpuDevice& gpu = *machine.gpu;
#ifdef TESSERA_SM120_EMULATED
  constexpr const char* kNeeded = "9.0 (this build has block-scaled mma.sync in software)";
  if (gpu.compute_major == 9) return true;
#else
  constexpr const char* kNeeded = "12.0 or 12.1 (RTX PRO 6000, RTX 5090, GB10)";
  if (gpu.compute_major == 12 && gpu.compute_minor <= 1) return true;
#endif
  why_not = fmt::format("needs compute capability {}, found {}.{}", kNeeded, gpu.compute_major, gpu.compute_minor);
  return false;
}

template <class Desc>
const PackedLayout* packed_layout(const Desc&) {
  return &sm120::kScaledUnits;
}

constexpr Variant<Linear> kLinear[] = {
    {"block_scaled", sm120::linear_supports, packed_layout<Linear::Desc>, sm120::linear_workspace, sm120::linear}};
constexpr Variant<MoeExperts> kMoeExperts[] = {{"block_scaled", sm120::moe_experts_supports,
                                                packed_layout<MoeExperts::Desc>, sm120::moe_experts_workspace,
                                                sm120::moe_experts}};
constexpr Variant<LinearGroup> kLinearGroup[] = {{"block_scaled", sm120::linear_group_supports,
                                                  packed_layout<LinearGroup::Desc>, sm120::linear_group_workspace,
                                                  sm120::linear_group}};

}  // namespace

extern constinit const Backend sm120_backend = {
    .name = "sm120",
    .available = available,
    .verification = Verification::kEmulated,
    .variants = make_variants(kLinear, kMoeExperts, kLinearGroup),
    .is_on_gpu = true,
    .extends = &cuda_backend,
};

}  // namespace tessera::backends
