// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention_kernel.h"

#include "backends/avx2/kernels.h"
#include "backends/avx2/operands.h"

namespace tessera::backends::avx2 {

void attention_fma(const cpu_common::AttentionJob& job) {
  cpu_common::attend<Floats>(job);
}

}  // namespace tessera::backends::avx2
