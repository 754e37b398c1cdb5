// SPDX-License-Identifier: Apache-2.0
#pragma once
// Linear maps and experts as backend amx has them, in blocks of the same size, on tiles in software. Need AVX-512 with
// VBMI.
#include "backends/amx/kernels.h"
#include "backends/amx_emulation.h"
#include "backends/avx512/kernels.h"
#include "backends/cpu_common/panel_variants.h"

namespace tessera::testing {

inline constexpr backends::cpu_common::PanelKernels kEmulatedKernels = {.input = DType::kBF16,
                                                                        .in_multiple = 32,
                                                                        .job_rows = backends::amx::kMostJobRows,
                                                                        .nvfp4 = backends::amx_emulated::nvfp4,
                                                                        .fp8 = backends::amx_emulated::fp8,
                                                                        .bf16 = backends::amx_emulated::bf16,
                                                                        .f32 = nullptr,
                                                                        .store = backends::avx512::store,
                                                                        .gate = backends::avx512::gate,
                                                                        .job_panels = backends::amx::kMostJobPanels,
                                                                        .takes_tiles = true};
inline constexpr ops::Variant<ops::Linear> kEmulatedLinear =
    backends::cpu_common::linear_variant<kEmulatedKernels>("emulated");
inline constexpr ops::Variant<ops::MoeExperts> kEmulatedMoe =
    backends::cpu_common::moe_variant<kEmulatedKernels>("emulated");

}  // namespace tessera::testing
