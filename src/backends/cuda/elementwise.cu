// SPDX-License-Identifier: Apache-2.0
// Ops whose outputs each depend on a few inputs: embedding, stream_add, swiglu, moe_combine, mhc_post. One thread per
// output or four neighbouring ones (mhc_post: all streams of a channel).
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/peer_packs.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 256;

__global__ void embedding_kernel(Values weight, const int32_t* ids, Values out, int64_t streams, int64_t hidden,
                                 int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  out.store(i, weight[max(ids[i / hidden / streams], 0) * hidden + i % hidden]);
}

__global__ void stream_add_kernel(Values z, Values e, Values out, int64_t streams, int64_t hidden, int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  out.store(i, z[i] + e[i / hidden / streams * hidden + i % hidden]);
}

__global__ void swiglu_kernel(Values gate, Values up, Values out, float limit, int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  out.store(i, swiglu_value(gate[i], up[i], limit));
}

template <int kWide>
__global__ void moe_combine_kernel(ExpertSum experts, Values out, int64_t count) {
  wait_for_previous();
  const int64_t i = item_index() * kWide;
  if (i >= count) return;
  const int64_t t = i / experts.hidden, c = i % experts.hidden;
  if constexpr (kWide == 4) {
    if (experts.routed.is_bf16) return store_pack(out, i, experts.of_bf16<kSlotsAtOnce>(t, c));
  }
  store_pack(out, i, experts.at<kWide, kSlotsAtOnce>(t, c));
}

// All four streams of a channel in one thread: `out` may be `x`.
template <int kWide>
__device__ void write_all(const StreamWrite& write, int64_t t, int64_t c, const StreamWrite::Inputs<kWide>& in) {
  // No load waits for a store.
  Pack<kWide> written[ops::kHcStreams];
#pragma unroll
  for (int k = 0; k < ops::kHcStreams; ++k) written[k] = write.stream(t, k, in);
#pragma unroll
  for (int k = 0; k < ops::kHcStreams; ++k) {
    store_pack(write.out, (t * ops::kHcStreams + k) * write.hidden + c, written[k]);
  }
}

template <int kWide>
__global__ void mhc_post_kernel(StreamWrite write, int64_t count) {
  wait_for_previous();
  const int64_t i = item_index() * kWide;
  if (i >= count) return;
  const int64_t t = i / write.hidden, c = i % write.hidden;
  write_all(write, t, c, write.load<kWide, kSlotsAtOnce>(t, c));
}

constexpr int kSumBlock = 128, kMostSumBlocks = 512, kSumChannels = kPeerValues;

// What this rank adds goes to all others before any of theirs is waited for: write.o, of F32; or what the experts gave,
// which write.o (BF16) then keeps. A block waits for the block of its own number on other ranks alone, and blocks begin
// in the order of their numbers: on GPUs of fewer than 86 multiprocessors, where not all have room at once (six on
// each), those that wait are those that began first everywhere. Of what the experts gave, all ranks' words are on their
// way together; of F32 there are no registers for that.
template <bool kIsF32>
__global__ void __launch_bounds__(kSumBlock, 6)
    sum_ranks_and_write(const __grid_constant__ StreamWrite write, const __grid_constant__ device::PeerView peers,
                        int64_t num_packs) {
  constexpr int kRanksAtOnce = kIsF32 ? 1 : device::kMaxPeers;
  wait_for_previous();
  const uint32_t call = device::cuda::begin_peer_call(peers);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSumBlock;
  const auto token_of = [&](int64_t pack) { return pack * kSumChannels / write.hidden; };
  const auto channel_of = [&](int64_t pack) { return pack * kSumChannels % write.hidden; };
  for (int64_t pack = item_index(); pack < num_packs; pack += step) {
    const int64_t i = pack * kSumChannels;
    if constexpr (kIsF32) {
      send_to_ranks<true>(peers, call, i, load_pack<kSumChannels>(write.o, i));
    } else {
      const auto own = write.experts.at<kSumChannels, kSlotsAtOnce>(token_of(pack), channel_of(pack));
      send_to_ranks<false>(peers, call, i, own);
      store_pack(write.o, i, own);
    }
  }
  for (int64_t pack = item_index(); pack < num_packs; pack += step) {
    const int64_t t = token_of(pack), c = channel_of(pack);
    auto in = write.load<kSumChannels, kSlotsAtOnce>(t, c);
    in.o = sum_of_ranks<kIsF32, true, kRanksAtOnce>(peers, call, pack * kSumChannels, [&] { return in.o; });
    write_all(write, t, c, in);
  }
  device::cuda::end_peer_call(peers, call, gridDim.x);
}

}  // namespace

void embedding(const ops::Embedding::Desc& desc, const ops::Embedding::Args& args, device::Queue& queue) {
  const int64_t count = args.num_tokens * desc.streams * desc.hidden;
  launch("embedding", queue, embedding_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.weight), args.ids,
         values_of(args.out), desc.streams, desc.hidden, count);
}

void stream_add(const ops::StreamAdd::Desc& desc, const ops::StreamAdd::Args& args, device::Queue& queue) {
  const int64_t count = args.num_tokens * desc.streams * desc.hidden;
  launch("stream_add", queue, stream_add_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.z),
         values_of(args.e), values_of(args.out), desc.streams, desc.hidden, count);
}

void swiglu(const ops::SwiGlu::Desc& desc, const ops::SwiGlu::Args& args, device::Queue& queue) {
  const int64_t count = args.num_tokens * desc.inner;
  launch("swiglu", queue, swiglu_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.gate), values_of(args.up),
         values_of(args.out), desc.limit, count);
}

void moe_combine(const ops::MoeCombine::Desc& desc, const ops::MoeCombine::Args& args, device::Queue& queue) {
  const ExpertSum experts{values_of(args.routed), values_of(args.shared), desc.top_k, desc.hidden};
  const int64_t count = args.num_tokens * desc.hidden;
  const auto start = [&](auto kernel, int wide) {
    launch("moe_combine", queue, kernel, grid_for(count / wide, kBlock), kBlock, 0, experts, values_of(args.out),
           count);
  };
  has_packs(desc.hidden) ? start(moe_combine_kernel<4>, 4) : start(moe_combine_kernel<1>, 1);
}

void mhc_post(const ops::MhcDesc& desc, const ops::MhcPost::Args& args, device::Queue& queue) {
  write_streams(stream_write(desc, args), args.num_tokens, queue);
}

void write_streams(const StreamWrite& write, int64_t num_tokens, device::Queue& queue) {
  const int64_t count = num_tokens * write.hidden;
  const auto start = [&](auto kernel, int wide) {
    launch("mhc_post", queue, kernel, grid_for(count / wide, kBlock), kBlock, 0, write, count);
  };
  has_packs(write.hidden) ? start(mhc_post_kernel<4>, 4) : start(mhc_post_kernel<1>, 1);
}

void write_sums_of_ranks(const StreamWrite& write, const device::PeerView& peers, int64_t num_tokens,
                         device::Queue& queue) {
  const int64_t num_packs = num_tokens * write.hidden / kSumChannels;
  const auto blocks = std::min<int64_t>(ceil_div<int64_t>(num_packs, kSumBlock), kMostSumBlocks);
  launch("mhc_post_pre", queue, write.o.is_bf16 ? sum_ranks_and_write<false> : sum_ranks_and_write<true>,
         grid_for(blocks, 1), kSumBlock, 0, write, peers, num_packs);
}

}  // namespace tessera::backends::cuda
