// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of this folder export: plain functions on raw pointers, called from backend.cc and, through
// function pointers, from cpu_common.
#include "backends/cpu_common/kernel_jobs.h"

namespace tessera::backends::amx {

// Rows of x and panels of a job at most. Decoding for 128 rows hides behind their products. x comes from behind the
// second-level cache once for 16 panels: of a chunk of inputs 64 KiB, beside 128 KiB of sums.
constexpr int64_t kMostJobRows = 128, kMostJobPanels = 16;

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
