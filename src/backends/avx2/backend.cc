// SPDX-License-Identifier: Apache-2.0
// AVX2 with FMA and F16C: any x86-64-v3 machine (Haswell, Zen and later).
#include "ops/backend.h"
#include "backends/avx2/kernels.h"
#include "backends/cpu_common/attention.h"
#include "backends/cpu_common/index_scores.h"
#include "backends/cpu_common/panel_variants.h"
#include "backends/cpu_common/row_variants.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.avx2) return true;
  why_not = "the processor lacks AVX2, FMA or F16C";
  return false;
}

constexpr cpu_common::PanelKernels kFmaKernels = {
    DType::kF32,    cpu_common::kPanelBlock, 48,          avx2::nvfp4_fma, avx2::fp8_fma,
    avx2::bf16_fma, avx2::f32_fma,           avx2::store, avx2::gate};

constexpr Variant<Linear> kLinear[] = {cpu_common::linear_variant<kFmaKernels>("fma")};
constexpr Variant<MoeExperts> kMoeExperts[] = {cpu_common::moe_variant<kFmaKernels>("fma")};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {cpu_common::grouped_linear_variant<kFmaKernels>("fma")};
constexpr Variant<Attention> kAttention[] = {cpu_common::attention_variant<avx2::attention_fma>("fma")};
constexpr Variant<IndexScores> kIndexScores[] = {cpu_common::index_scores_variant<avx2::index_scores_fma>("fma")};

}  // namespace

extern constinit const Backend avx2_backend = {"avx2", available, Verification::kRunOnHardware,
                                               cpu_common::with_row_variants<avx2::rows>(make_variants(
                                                   kLinear, kGroupedLinear, kMoeExperts, kAttention, kIndexScores))};

}  // namespace tessera::backends
