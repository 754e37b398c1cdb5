// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/index_kernel.h"

#include "backends/avx512/kernels.h"
#include "backends/cpu_common/avx512_operands.h"

namespace tessera::backends::avx512 {

void index_scores_bf16(const cpu_common::IndexJob& job) {
  cpu_common::index_scores<cpu_common::Bf16Pairs>(job);
}
void index_scores_fma(const cpu_common::IndexJob& job) {
  cpu_common::index_scores<cpu_common::Floats>(job);
}

}  // namespace tessera::backends::avx512
