// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VBMI (Ice Lake, Zen 4 and later). Variants named bf16 use dot products of BF16 pairs, which Ice Lake
// lacks; those named fma do without.
#include "ops/backend.h"
#include "backends/avx512/kernels.h"
#include "backends/cpu_common/attention.h"
#include "backends/cpu_common/index_scores.h"
#include "backends/cpu_common/panel_variants.h"
#include "backends/cpu_common/row_variants.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.avx512) return true;
  why_not = "the processor lacks AVX-512 F, BW, VL, DQ or VBMI";
  return false;
}

bool has_bf16(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.avx512_bf16) return true;
  why_not = "the processor lacks AVX512_BF16";
  return false;
}

using cpu_common::kPanelBlock;
constexpr int64_t kJobRows = 72;  // of 8 KiB: with a panel's sums they fit into a second-level cache of 1 MiB
constexpr cpu_common::PanelKernels kBf16Kernels = {DType::kBF16,     kPanelBlock,       kJobRows, avx512::nvfp4_bf16,
                                                   avx512::fp8_bf16, avx512::bf16_bf16, nullptr,  avx512::store,
                                                   avx512::gate};
constexpr cpu_common::PanelKernels kFmaKernels = {DType::kF32,       kPanelBlock,     kJobRows,
                                                  avx512::nvfp4_fma, avx512::fp8_fma, avx512::bf16_fma,
                                                  avx512::f32_fma,   avx512::store,   avx512::gate};

constexpr Variant<Linear> kLinear[] = {cpu_common::linear_variant<kBf16Kernels>("bf16", has_bf16),
                                       cpu_common::linear_variant<kFmaKernels>("fma")};
constexpr Variant<MoeExperts> kMoeExperts[] = {cpu_common::moe_variant<kBf16Kernels>("bf16", has_bf16),
                                               cpu_common::moe_variant<kFmaKernels>("fma")};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {cpu_common::grouped_linear_variant<kBf16Kernels>("bf16", has_bf16),
                                                     cpu_common::grouped_linear_variant<kFmaKernels>("fma")};
constexpr Variant<Attention> kAttention[] = {cpu_common::attention_variant<avx512::attention_bf16>("bf16", has_bf16),
                                             cpu_common::attention_variant<avx512::attention_fma>("fma")};
constexpr Variant<IndexScores> kIndexScores[] = {
    cpu_common::index_scores_variant<avx512::index_scores_bf16>("bf16", has_bf16),
    cpu_common::index_scores_variant<avx512::index_scores_fma>("fma")};

}  // namespace

extern constinit const Backend avx512_backend = {"avx512", available, Verification::kRunOnHardware,
                                                 cpu_common::with_row_variants<avx512::rows>(make_variants(
                                                     kLinear, kGroupedLinear, kMoeExperts, kAttention, kIndexScores))};

}  // namespace tessera::backends
