// SPDX-License-Identifier: Apache-2.0
// attention of a handful of tokens: cuda/attention_few.cuh, 16 heads of a token to a cluster of four thread blocks.
#include "backends/cuda/attention_few.cuh"
#include "backends/sm90/attention_keys.cuh"
#include "backends/sm90/kernels.h"

namespace tessera::backends::sm90 {

bool attention_few(const ops::Attention::Desc& desc, const ops::Attention::Args& args, int64_t splits,
                   const cuda_common::OutRotation& rotation, device::Queue& queue) {
  return cuda::attention_few::run<4, attention_wide::kSlots>(desc, args, splits, rotation, queue);
}

}  // namespace tessera::backends::sm90
