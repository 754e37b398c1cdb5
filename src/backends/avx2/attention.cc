// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention_kernel.h"

#include "backends/avx2/kernels.h"
#include "backends/avx2/operands.h"

namespace tessera::backends::avx2 {

constinit const cpu_common::AttentionKernels attention_fma = cpu_common::attention_kernels<Floats>();

}  // namespace tessera::backends::avx2
