// SPDX-License-Identifier: Apache-2.0
#pragma once
// mhc_post as its own op and as a step of the fused one, with a sum over ranks too.
#include "backends/cuda_common/streams.cuh"
#include "device/peer_view.h"
#include "device/queue.h"

namespace tessera::backends::cuda {

inline cuda_common::StreamWrite stream_write(const ops::MhcDesc& desc, const ops::MhcPost::Args& args) {
  using cuda_common::values_of;
  return {values_of(args.x), values_of(args.o), {}, args.post, args.comb, values_of(args.out), desc.hidden};
}

// The kernel of mhc_post; `out` may be `x`.
void write_streams(const cuda_common::StreamWrite& write, int64_t num_tokens, device::Queue& queue);

// The same with a sum over ranks in place of write.o: of write.o where it is F32; else of what `write.experts` gives,
// which is kept in write.o meanwhile.
void write_sums_of_ranks(const cuda_common::StreamWrite& write, const device::PeerView& peers, int64_t num_tokens,
                         device::Queue& queue);

}  // namespace tessera::backends::cuda
