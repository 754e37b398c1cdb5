// SPDX-License-Identifier: Apache-2.0
// AMX tiles with BF16 products (Sapphire Rapids and later); what tiles do not suit is left to avx512.
#include "ops/backend.h"
#include "backends/amx/kernels.h"
#include "backends/cpu_common/panel_variants.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.amx_bf16) return true;
  why_not = "the processor or the kernel lacks AMX tiles with BF16";
  return false;
}

constexpr cpu_common::PanelKernels kTileKernels = {DType::kBF16, 32,      cpu_common::kJobRows, amx::nvfp4, amx::fp8,
                                                   amx::bf16,    nullptr, amx::store,           amx::gate};

constexpr Variant<Linear> kLinear[] = {cpu_common::linear_variant<kTileKernels>("tiles")};
constexpr Variant<MoeExperts> kMoeExperts[] = {cpu_common::moe_variant<kTileKernels>("tiles")};

}  // namespace

extern constinit const Backend amx_backend = {"amx", available, Verification::kRunOnHardware,
                                              make_variants(kLinear, kMoeExperts)};

}  // namespace tessera::backends
