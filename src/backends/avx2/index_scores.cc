// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/index_kernel.h"

#include "backends/avx2/kernels.h"
#include "backends/avx2/operands.h"

namespace tessera::backends::avx2 {

void index_scores_fma(const cpu_common::IndexJob& job) {
  cpu_common::index_scores<Floats>(job);
}

}  // namespace tessera::backends::avx2
