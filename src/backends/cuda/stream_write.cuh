// SPDX-License-Identifier: Apache-2.0
#pragma once
// mhc_post as its own op and as a step of the fused one.
#include "backends/cuda_common/streams.cuh"
#include "device/queue.h"

namespace tessera::backends::cuda {

inline cuda_common::StreamWrite stream_write(const ops::MhcDesc& desc, const ops::MhcPost::Args& args) {
  using cuda_common::values_of;
  return {values_of(args.x), values_of(args.o), {}, args.post, args.comb, values_of(args.out), desc.hidden};
}

// The kernel of mhc_post; `out` may be `x`.
void write_streams(const cuda_common::StreamWrite& write, int64_t num_tokens, device::Queue& queue);

}  // namespace tessera::backends::cuda
