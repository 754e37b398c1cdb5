// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/index_kernel.h"

#include "backends/avx512/kernels.h"
#include "backends/avx512/operands.h"

namespace tessera::backends::avx512 {

void index_scores_bf16(const cpu_common::IndexJob& job) {
  cpu_common::index_scores<Bf16Pairs>(job);
}
void index_scores_fma(const cpu_common::IndexJob& job) {
  cpu_common::index_scores<Floats>(job);
}

}  // namespace tessera::backends::avx512
