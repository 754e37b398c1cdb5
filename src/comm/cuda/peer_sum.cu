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

constexpr int kBlocks = 128, kThreads = 256;  // all of them in place at once
constexpr int kAtOnce = 4;                    // slots of a thread whose loads are on their way together
constexpr int kLanes = 32;
static_assert(kPeerGroupWords == kPeerSlotWords * kLanes && kThreads % kLanes == 0);

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

// Of a thread's slots, kStep apart, kAtOnce from `first` on.
constexpr int64_t kStep = int64_t{kBlocks} * kThreads;
__device__ void send(const PeerJob& job, uint32_t call, int64_t first) {
  const PeerView& view = job.view;
  uint64_t words[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    words[n] = first + n * kStep < job.num_slots ? own_words(job, first + n * kStep) : 0;
  }
  for (int r = 0; r < view.world; ++r) {
    if (r == view.rank) continue;
    volatile uint64_t* slots = peer_slot(view, r, view.rank, call, first);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n * kStep < job.num_slots) slots[n * kStep] = words[n];
    }
  }
}

__device__ void collect(const PeerJob& job, uint32_t call, int64_t first) {
  const PeerView& view = job.view;
  Sums sums[kAtOnce];
  for (int r = 0; r < view.world; ++r) {
    const bool is_own = r == view.rank;
    volatile uint64_t* slots = peer_slot(view, view.rank, r, call, first);
    uint64_t words[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t slot = first + n * kStep;
      if (slot < job.num_slots) words[n] = is_own ? own_words(job, slot) : slots[n * kStep];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n * kStep >= job.num_slots) break;
      if (!is_own) words[n] = wait_for_peer_words(view, slots + n * kStep, words[n]);
      add_words(job, words[n], r == 0, sums[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    if (first + n * kStep < job.num_slots) store_sums(job, first + n * kStep, sums[n]);
  }
}

// May be in place before the kernel before it has ended, as kernels of backends are, and lets the next one be so, whose
// blocks take no place from these: all of them have theirs by then.
__global__ void __launch_bounds__(kThreads) peer_sum_kernel(const __grid_constant__ PeerJob job) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const uint32_t call = begin_peer_call(job.view);
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (job.sends) send(job, call, first);
  // What is waited for next is sent before: while words are on the link those before them are added up.
  for (; first < job.num_slots; first += kAtOnce * kStep) {
    if (job.sends) send(job, call, first + kAtOnce * kStep);
    if (job.collects) collect(job, call, first);
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
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(num_slots, kThreads), kBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(queue.stream());
  if (queue.overlaps_kernels()) config.attrs = &overlap, config.numAttrs = 1;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, peer_sum_kernel, job));
}

}  // namespace tessera::comm
