// SPDX-License-Identifier: Apache-2.0
// AMX tiles with BF16 products (Sapphire Rapids and later); what tiles do not suit is left to avx512.
#include "ops/backend.h"
#include "backends/amx/kernels.h"
#include "backends/cpu_common/attention.h"
#include "backends/cpu_common/index_scores.h"
#include "backends/cpu_common/panel_variants.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.amx_bf16) return true;
  why_not = "the processor or the kernel lacks AMX tiles with BF16";
  return false;
}

constexpr cpu_common::PanelKernels kTileKernels = {.input = DType::kBF16,
                                                   .in_multiple = 32,
                                                   .job_rows = amx::kMostJobRows,
                                                   .nvfp4 = amx::nvfp4,
                                                   .fp8 = amx::fp8,
                                                   .bf16 = amx::bf16,
                                                   .f32 = nullptr,
                                                   .store = amx::store,
                                                   .gate = amx::gate,
                                                   .job_panels = amx::kMostJobPanels,
                                                   .takes_tiles = true};
static_assert(kTileKernels.job_rows <= cpu_common::kJobRows && kTileKernels.job_panels <= cpu_common::kJobPanels);
static_assert(kTileKernels.job_rows % (2 * cpu_common::kTileBlock) == 0);

constexpr Variant<Linear> kLinear[] = {cpu_common::linear_variant<kTileKernels>("tiles")};
constexpr Variant<MoeExperts> kMoeExperts[] = {cpu_common::moe_variant<kTileKernels>("tiles")};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {cpu_common::grouped_linear_variant<kTileKernels>("tiles")};
constexpr Variant<Attention> kAttention[] = {cpu_common::attention_variant<amx::attention>("tiles")};
constexpr Variant<IndexScores> kIndexScores[] = {cpu_common::index_scores_variant<amx::index_scores>("tiles")};

}  // namespace

extern constinit const Backend amx_backend = {
    "amx", available, Verification::kRunOnHardware,
    make_variants(kLinear, kGroupedLinear, kMoeExperts, kAttention, kIndexScores)};

}  // namespace tessera::backends
