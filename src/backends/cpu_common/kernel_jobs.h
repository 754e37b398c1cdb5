// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of a folder take and export: plain data and plain functions on raw pointers, called from its
// backend.cc and, through function pointers, from here.
#include "backends/cpu_common/attention_job.h"
#include "backends/cpu_common/index_job.h"
#include "backends/cpu_common/panel.h"
#include "backends/cpu_common/row_kernels.h"
