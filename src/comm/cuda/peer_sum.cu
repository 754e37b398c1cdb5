// SPDX-License-Identifier: Apache-2.0
// The sum over ranks through peer memory. Bound by latency for one token: a load of the summand, a store over the link,
// the poll that finds it. Of many tokens by the link, which carries the summand and nothing else.
#include "comm/cuda/peer_sum.h"

#include <algorithm>

#include "base/integer_math.h"
#include "comm/rank_sum.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kPollsBetweenLooks = 4096;  // at `ended`, which is over the bus
constexpr int kAtOnce = 4;                // slots of a thread whose loads are on their way together
constexpr int kLanes = 32, kSlotWords = 2;
static_assert(kPeerGroupWords == kSlotWords * kLanes && kPeerThreads % kLanes == 0);
constexpr uint64_t kNoWords = ~uint64_t{0};

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

// What a rank adds at this slot; behind the end anything.
__device__ uint64_t own_words(const PeerJob& job, int64_t slot) {
  uint32_t words[kSlotWords];
#pragma unroll
  for (int i = 0; i < kSlotWords; ++i) {
    const int64_t at = word_of(slot, i);
    words[i] = at < job.num_words ? static_cast<const uint32_t*>(job.in)[at] : 0;
    if (words[i] == kNoWord) words[i] = kNoWord >> 1;  // NaN with another sign; of BF16 the second's alone
  }
  return uint64_t{words[1]} << 32 | words[0];
}

__device__ volatile uint64_t* place_of(const PeerView& view, int receiver, int sender, uint32_t call, int64_t slot) {
  return view.slots[receiver] + (int64_t{call & 1u} * view.world + sender) * (view.capacity / kSlotWords) + slot;
}

__device__ bool is_whole(uint64_t words) {
  return static_cast<uint32_t>(words) != kNoWord && static_cast<uint32_t>(words >> 32) != kNoWord;
}

// Each word is seen whole or not at all, both of them in any order. `words`: what was found there first.
__device__ uint64_t wait_for_words(const PeerView& view, volatile uint64_t* place, uint64_t words) {
  for (unsigned polls = 1; !is_whole(words); ++polls) {
    if (polls % kPollsBetweenLooks == 0 && *static_cast<const volatile uint32_t*>(view.ended) != 0) return 0;
    words = *place;
  }
  *place = kNoWords;
  return words;
}

// Values of a slot's words, two where they are BF16.
struct Sums {
  float v[kSlotWords][2];
};

__device__ void add_words(const PeerJob& job, uint64_t words, bool is_first, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kSlotWords; ++i) {
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
  for (int i = 0; i < kSlotWords; ++i) {
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

// Calls act(first) for the first slot of each kAtOnce that this thread has, kStep apart.
constexpr int64_t kStep = int64_t{kPeerBlocks} * kPeerThreads;
template <class Act>
__device__ void for_slots(const PeerJob& job, const Act& act) {
  for (int64_t first = int64_t{blockIdx.x} * kPeerThreads + threadIdx.x; first < job.num_slots;
       first += kAtOnce * kStep) {
    act(first);
  }
}

__device__ void send(const PeerJob& job, uint32_t call, int64_t first) {
  const PeerView& view = job.view;
  uint64_t words[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n)
    words[n] = first + n * kStep < job.num_slots ? own_words(job, first + n * kStep) : 0;
  for (int r = 0; r < view.world; ++r) {
    if (r == view.rank) continue;
    volatile uint64_t* place = place_of(view, r, view.rank, call, first);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n * kStep < job.num_slots) place[n * kStep] = words[n];
    }
  }
}

__device__ void collect(const PeerJob& job, uint32_t call, int64_t first) {
  const PeerView& view = job.view;
  Sums sums[kAtOnce];
  for (int r = 0; r < view.world; ++r) {
    const bool is_own = r == view.rank;
    volatile uint64_t* place = place_of(view, view.rank, r, call, first);
    uint64_t words[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t slot = first + n * kStep;
      if (slot < job.num_slots) words[n] = is_own ? own_words(job, slot) : place[n * kStep];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n * kStep >= job.num_slots) break;
      if (!is_own) words[n] = wait_for_words(view, place + n * kStep, words[n]);
      add_words(job, words[n], r == 0, sums[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    if (first + n * kStep < job.num_slots) store_sums(job, first + n * kStep, sums[n]);
  }
}

// May be in place before the kernel before it has ended, as kernels of backends are; lets the next one be so, whose
// blocks take no place from these, all of which have theirs by then.
__global__ void __launch_bounds__(kPeerThreads) peer_sum_kernel(const __grid_constant__ PeerJob job) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const uint32_t call = job.view.calls[blockIdx.x];
  // All of it is sent before anything is waited for: who waits keeps nobody from sending.
  if (job.sends) for_slots(job, [&](int64_t first) { send(job, call, first); });
  if (!job.collects) return;
  for_slots(job, [&](int64_t first) { collect(job, call, first); });
  __syncthreads();
  if (threadIdx.x == 0) job.view.calls[blockIdx.x] = call + 1;
}

}  // namespace

void peer_sum_on_gpu(const PeerView& view, const void* in, bool in_bf16, void* out, bool out_bf16, int64_t count,
                     const device::Queue& queue, PeerPart part) {
  const int64_t num_words = in_bf16 ? count / 2 : count;
  const int64_t num_slots = ceil_div<int64_t>(num_words, kPeerGroupWords) * kLanes;
  const PeerJob job{view,      in,       out, in_bf16, out_bf16, part != PeerPart::kCollect, part != PeerPart::kSend,
                    num_words, num_slots};
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(num_slots, kPeerThreads), kPeerBlocks)));
  config.blockDim = dim3(kPeerThreads);
  config.stream = static_cast<cudaStream_t>(queue.stream());
  if (queue.overlaps_kernels()) config.attrs = &overlap, config.numAttrs = 1;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, peer_sum_kernel, job));
}

}  // namespace tessera::comm
