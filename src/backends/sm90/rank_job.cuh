// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of rank_experts share: rows of all ranks' tokens, [world, most_tokens], and where their slots go.
#include <cstdint>

#include "backends/sm90/moe_job.cuh"
#include "device/cuda/peer_exchange.cuh"
#include "device/expert_peers.h"

namespace tessera::backends::sm90 {

// The workspace, but for that of the experts' kernels: what was received, and this rank's own. Rows of which no slot is
// of this rank's experts are anything; so are weights of tokens that there are not, whose ids are -1.
struct RankRows {
  int32_t* experts;     // [world, most_tokens, top_k]
  float* routing;       // [world, most_tokens, top_k]
  uint64_t* x;          // [world, most_tokens, hidden], four values each
  uint64_t** returned;  // [world] ExpertPeers::returned, where a kernel may index them
};

// The last map's outputs lie with the ranks whose tokens they are, in front of which each slot has its place.
struct RankMoeJob : MoeJob {
  uint64_t* const* returned;
  cuda_common::FastDivisor rank_slots;  // of a rank

  // Two lanes exchange halves, so that each stores a peer's slot, and four of them 32 bytes, a sector of the link.
  __device__ void store_columns(int32_t slot, int column, uint32_t low, uint32_t high) const {
    constexpr int kValues = device::ExpertPeersShape::kValues;
    const bool is_high = threadIdx.x % 2 != 0;
    const uint32_t other = __shfl_xor_sync(~0u, is_high ? low : high, 1);
    if (slot < 0) return;
    const uint32_t rank = rank_slots.quotient(static_cast<uint32_t>(slot));
    const uint32_t in_rank = static_cast<uint32_t>(slot) - rank * rank_slots.divisor();
    const int64_t at = (int64_t{in_rank} * hidden + column + (is_high ? 8 - kValues / 2 : 0)) / kValues;
    *const_cast<volatile uint64_t*>(returned[rank] + at) =
        is_high ? device::cuda::peer_words(other, high) : device::cuda::peer_words(low, other);
  }
};

// This rank's tokens go to the ranks that have their experts (`sends`), and those of all ranks are taken in
// (`collects`).
struct RankExchangeJob {
  device::ExpertPeers peers;
  const int32_t* experts;  // of this rank: [tokens, top_k]
  const float* routing;
  const uint64_t* x;  // [tokens, hidden]
  int64_t num_tokens, most_tokens, num_local;
  RankRows rows;
  bool sends, collects;
};
void exchange_rows(const RankExchangeJob& job, const device::Queue& queue);

// out[t] = the sum of the token's slots, which come back from the ranks, and of `shared`, as moe_combine has it.
void combine_returned(const device::ExpertPeers& peers, const TensorView& shared, const TensorView& out,
                      int64_t num_tokens, const device::Queue& queue);

}  // namespace tessera::backends::sm90
