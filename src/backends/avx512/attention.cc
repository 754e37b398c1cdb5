// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention_kernel.h"

#include "backends/avx512/kernels.h"
#include "backends/cpu_common/avx512_operands.h"

namespace tessera::backends::avx512 {

constinit const cpu_common::AttentionKernels attention_bf16 = cpu_common::attention_kernels<cpu_common::Bf16Pairs>();
constinit const cpu_common::AttentionKernels attention_fma = cpu_common::attention_kernels<cpu_common::Floats>();

}  // namespace tessera::backends::avx512
