// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of this folder export.
#include "backends/cpu_common/kernel_jobs.h"

namespace tessera::backends::avx2 {

// Panel sums (cpu_common/panel.h), x in FP32.
void nvfp4_fma(const cpu_common::PanelJob& job);
void fp8_fma(const cpu_common::PanelJob& job);
void bf16_fma(const cpu_common::PanelJob& job);
void f32_fma(const cpu_common::PanelJob& job);

// What follows them.
void store(const cpu_common::StoreJob& job);
void gate(const cpu_common::GateJob& job);

extern const cpu_common::RowKernels rows;

// Attention of one token.
extern const cpu_common::AttentionKernels attention_fma;

// Index scores of a block of keys.
void index_scores_fma(const cpu_common::IndexJob& job);

}  // namespace tessera::backends::avx2
