// SPDX-License-Identifier: Apache-2.0
// Ops whose outputs each depend on a few inputs: embedding, stream_add, swiglu, moe_combine, mhc_post. One thread per
// output or four neighbouring ones (mhc_post: all streams of a channel).
#include "backends/cuda/kernels.h"
#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 256;
constexpr int kSlotsAtOnce = 8;

__global__ void embedding_kernel(Values weight, const int32_t* ids, Values out, int64_t streams, int64_t hidden,
                                 int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  out.store(i, weight[ids[i / hidden / streams] * hidden + i % hidden]);
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
  store_pack(out, i, experts.at<kWide, kSlotsAtOnce>(i / experts.hidden, i % experts.hidden));
}

// All four streams of a channel in one thread: `out` may be `x`.
template <int kWide>
__global__ void mhc_post_kernel(StreamWrite write, int64_t count) {
  wait_for_previous();
  const int64_t i = item_index() * kWide;
  if (i >= count) return;
  const int64_t t = i / write.hidden, c = i % write.hidden;
  const auto in = write.load<kWide, kSlotsAtOnce>(t, c);
  // No load waits for a store.
  Pack<kWide> written[ops::kHcStreams];
#pragma unroll
  for (int k = 0; k < ops::kHcStreams; ++k) written[k] = write.stream(t, k, in);
#pragma unroll
  for (int k = 0; k < ops::kHcStreams; ++k) {
    store_pack(write.out, (t * ops::kHcStreams + k) * write.hidden + c, written[k]);
  }
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

}  // namespace tessera::backends::cuda
