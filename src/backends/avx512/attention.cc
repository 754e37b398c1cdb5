// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention_kernel.h"

#include "backends/avx512/kernels.h"
#include "backends/avx512/operands.h"

namespace tessera::backends::avx512 {

void attention_bf16(const cpu_common::AttentionJob& job) {
  cpu_common::attend<Bf16Pairs>(job);
}
void attention_fma(const cpu_common::AttentionJob& job) {
  cpu_common::attend<Floats>(job);
}

}  // namespace tessera::backends::avx512
