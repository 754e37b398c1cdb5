// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of this folder export.
#include "backends/cpu_common/kernel_jobs.h"

namespace tessera::backends::avx512 {

// Panel sums (cpu_common/panel.h). _bf16: x in BF16, needs AVX512_BF16; _fma: x in FP32.
void nvfp4_bf16(const cpu_common::PanelJob& job);
void fp8_bf16(const cpu_common::PanelJob& job);
void bf16_bf16(const cpu_common::PanelJob& job);
void nvfp4_fma(const cpu_common::PanelJob& job);
void fp8_fma(const cpu_common::PanelJob& job);
void bf16_fma(const cpu_common::PanelJob& job);
void f32_fma(const cpu_common::PanelJob& job);

// What follows them.
void store(const cpu_common::StoreJob& job);
void gate(const cpu_common::GateJob& job);

extern const cpu_common::RowKernels rows;

// Attention of one token.
extern const cpu_common::AttentionKernels attention_bf16;
extern const cpu_common::AttentionKernels attention_fma;

// Index scores of a block of keys.
void index_scores_bf16(const cpu_common::IndexJob& job);
void index_scores_fma(const cpu_common::IndexJob& job);

}  // namespace tessera::backends::avx512
