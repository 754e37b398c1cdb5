// SPDX-License-Identifier: Apache-2.0
// Ops whose outputs each depend on a few inputs: embedding, stream_add, swiglu, moe_combine, mhc_post. One thread per
// output (mhc_post: per channel of a token).
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 256;

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

// Slots ascend, the shared expert comes last.
__global__ void moe_combine_kernel(Values routed, Values shared, Values out, int64_t top_k, int64_t hidden,
                                   int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  float sum = 0;
  if (routed.data != nullptr) {
    for (int64_t slot = 0; slot < top_k; ++slot) sum += routed[(i / hidden * top_k + slot) * hidden + i % hidden];
  }
  if (shared.data != nullptr) sum += shared[i];
  out.store(i, sum);
}

// All four streams of a channel in one thread: `out` may be `x`.
__global__ void mhc_post_kernel(Values x, Values o, const float* post, const float* comb, Values out, int64_t hidden,
                                int64_t count) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i >= count) return;
  const int64_t t = i / hidden, c = i % hidden;
  float streams[ops::kHcStreams];
  for (int j = 0; j < ops::kHcStreams; ++j) streams[j] = x[(t * ops::kHcStreams + j) * hidden + c];
  for (int k = 0; k < ops::kHcStreams; ++k) {
    float sum = 0;
    for (int j = 0; j < ops::kHcStreams; ++j) {
      sum += comb[(t * ops::kHcStreams + j) * ops::kHcStreams + k] * streams[j];
    }
    out.store((t * ops::kHcStreams + k) * hidden + c, post[t * ops::kHcStreams + k] * o[i] + sum);
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
  const int64_t count = args.num_tokens * desc.hidden;
  launch("moe_combine", queue, moe_combine_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.routed),
         values_of(args.shared), values_of(args.out), desc.top_k, desc.hidden, count);
}

void mhc_post(const ops::MhcDesc& desc, const ops::MhcPost::Args& args, device::Queue& queue) {
  const int64_t count = args.num_tokens * desc.hidden;
  launch("mhc_post", queue, mhc_post_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.x), values_of(args.o),
         args.post, args.comb, values_of(args.out), desc.hidden, count);
}

}  // namespace tessera::backends::cuda
