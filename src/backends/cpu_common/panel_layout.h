// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights as panels (panel.h): the packed layout of the CPU backends' linear maps and experts.
#include "backends/cpu_common/panel.h"
#include "ops/packed_layout.h"

namespace tessera::backends::cpu_common {

// Rows are padded to whole panels with zeros. Columns must be a multiple of 16.
const ops::PackedLayout* panel_layout();

// Panel number `index` of a packed weight.
Panel panel_of(const ops::WeightView& packed, int64_t index);
int64_t num_panels(int64_t rows);

}  // namespace tessera::backends::cpu_common
