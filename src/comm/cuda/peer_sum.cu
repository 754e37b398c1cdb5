// SPDX-License-Identifier: Apache-2.0
// The sum over ranks through peer memory. Bound by latency for one token: a load of the summand, a store over the link,
// the poll that finds it. Of many tokens by the link, which carries the summand and nothing else.
#include "comm/cuda/peer_sum.h"

#include <algorithm>

#include "comm/rank_sum.h"
#include "device/cuda/check.h"
#include "device/cuda/peer_exchange.cuh"

namespace tessera::comm {

namespace {

using namespace device::cuda;
using device::PeerView, device::kPeerSlotWords;

// All blocks are in place at once, one to a multiprocessor. Many threads keep the link busy, of few sums small blocks
// begin sooner.
constexpr int kMostBlocks = 128, kFewestThreads = 256, kMostThreads = 1024;
constexpr int kLanes = 32;
static_assert(kPeerGroupWords == kPeerSlotWords * kLanes && kFewestThreads % kLanes == 0);

struct PeerJob {
  PeerView view;
  const void* in;
  void* out;
  bool in_bf16, out_bf16, sends, collects;
  int64_t num_words, num_slots;
};

// Word i of a slot.
__device__ int64_t word_of(int64_t slot, int i) {
  return slot / kLanes * kPeerGroupWords + i * kLanes + slot % kLanes;
}

// What this rank adds at a slot; behind the end anything.
__device__ uint64_t own_words(const PeerJob& job, int64_t slot) {
  const auto word = [&](int i) {
    const int64_t at = word_of(slot, i);
    return at < job.num_words ? static_cast<const uint32_t*>(job.in)[at] : 0;
  };
  return peer_words(word(0), word(1));
}

// Values of a slot's words, two of a word where they are BF16.
struct Sums {
  float v[kPeerSlotWords][2];
};

__device__ void add_words(const PeerJob& job, uint64_t words, bool is_first, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kPeerSlotWords; ++i) {
    const auto bits = static_cast<uint32_t>(words >> 32 * i);
    const float values[2] = {
        job.in_bf16 ? numeric::bf16_to_float(static_cast<uint16_t>(bits)) : __builtin_bit_cast(float, bits),
        job.in_bf16 ? numeric::bf16_to_float(static_cast<uint16_t>(bits >> 16)) : 0.0f};
#pragma unroll
    for (int n = 0; n < 2; ++n) sums.v[i][n] = is_first ? values[n] : sums.v[i][n] + values[n];
  }
}

__device__ void store_sums(const PeerJob& job, int64_t slot, const Sums& sums) {
#pragma unroll
  for (int i = 0; i < kPeerSlotWords; ++i) {
    const int64_t at = word_of(slot, i);
    if (at >= job.num_words) return;
    if (!job.in_bf16) {
      store_value(job.out, job.out_bf16, at, sums.v[i][0]);
    } else if (job.out_bf16) {
      static_cast<uint32_t*>(job.out)[at] =
          uint32_t{numeric::bf16_from_float(sums.v[i][1])} << 16 | numeric::bf16_from_float(sums.v[i][0]);
    } else {
      store_value(job.out, false, 2 * at, sums.v[i][0]);
      store_value(job.out, false, 2 * at + 1, sums.v[i][1]);
    }
  }
}

__device__ void send(const PeerJob& job, uint32_t call, int64_t slot) {
  if (slot >= job.num_slots) return;
  const PeerView& view = job.view;
  const uint64_t words = own_words(job, slot);
  for (int r = 0; r < view.world; ++r) {
    if (r != view.rank) *peer_slot(view, r, view.rank, call, slot) = words;
  }
}

__device__ void collect(const PeerJob& job, uint32_t call, int64_t slot) {
  const PeerView& view = job.view;
  Sums sums;
  for (int r = 0; r < view.world; ++r) {
    volatile uint64_t* place = peer_slot(view, view.rank, r, call, slot);
    add_words(job, r == view.rank ? own_words(job, slot) : wait_for_peer_words(view, place, *place), r == 0, sums);
  }
  store_sums(job, slot, sums);
}

// May be in place before the kernel before it has ended, as kernels of backends are, and lets the next one be so, whose
// blocks take no place from these: all of them have theirs by then.
__global__ void __launch_bounds__(kMostThreads) peer_sum_kernel(const __grid_constant__ PeerJob job) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const uint32_t call = begin_peer_call(job.view);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (job.sends) send(job, call, slot);
  // What is waited for next is sent before: while words are on the link those before them are added up.
  for (; slot < job.num_slots; slot += step) {
    if (job.sends) send(job, call, slot + step);
    if (job.collects) collect(job, call, slot);
  }
  if (job.collects) end_peer_call(job.view, call);
}

}  // namespace

void peer_sum_on_gpu(const PeerView& view, const void* in, bool in_bf16, void* out, bool out_bf16, int64_t count,
                     const device::Queue& queue, PeerPart part) {
  const int64_t num_words = in_bf16 ? count / 2 : count, num_slots = peer_slots(num_words);
  const PeerJob job{view,      in,       out, in_bf16, out_bf16, part != PeerPart::kCollect, part != PeerPart::kSend,
                    num_words, num_slots};
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const int64_t threads = std::clamp<int64_t>(round_up<int64_t>(ceil_div<int64_t>(num_slots, kMostBlocks), kLanes),
                                              kFewestThreads, kMostThreads);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(num_slots, threads), kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(queue.stream());
  if (queue.overlaps_kernels()) config.attrs = &overlap, config.numAttrs = 1;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, peer_sum_kernel, job));
}

}  // namespace tessera::comm
