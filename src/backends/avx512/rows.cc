// SPDX-License-Identifier: Apache-2.0
// The ops between the large products.
#include "backends/cpu_common/row_templates.h"

#include "backends/avx512/kernels.h"
#include "backends/cpu_common/avx512_lanes.h"

namespace tessera::backends::avx512 {

constinit const cpu_common::RowKernels rows = cpu_common::row_kernels<cpu_common::Lanes>();

}  // namespace tessera::backends::avx512
