// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kernels of src/backends/amx compiled against tiles in software: proves their indexing, tails and order
// on machines without AMX. Needs AVX-512 with VBMI.
#include "backends/cpu_common/kernel_jobs.h"

namespace tessera::backends::amx_emulated {

void nvfp4(const cpu_common::PanelJob& job);
void fp8(const cpu_common::PanelJob& job);
void bf16(const cpu_common::PanelJob& job);
extern const cpu_common::AttentionKernels attention;
void index_scores(const cpu_common::IndexJob& job);

}  // namespace tessera::backends::amx_emulated
