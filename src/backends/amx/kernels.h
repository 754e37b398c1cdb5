// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of this folder export: plain functions on raw pointers, called from backend.cc and, through
// function pointers, from cpu_common.
#include "backends/cpu_common/kernel_jobs.h"

namespace tessera::backends::amx {

// Panel sums (cpu_common/panel.h), x in BF16, inputs in multiples of 32.
void nvfp4(const cpu_common::PanelJob& job);
void fp8(const cpu_common::PanelJob& job);
void bf16(const cpu_common::PanelJob& job);
// What follows them.
void store(const cpu_common::StoreJob& job);
void gate(const cpu_common::GateJob& job);

// Attention and index scores on tiles.
extern const cpu_common::AttentionKernels attention;
void index_scores(const cpu_common::IndexJob& job);

}  // namespace tessera::backends::amx
