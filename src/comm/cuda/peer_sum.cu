// SPDX-License-Identifier: Apache-2.0
// The sum over ranks through peer memory. Bound by latency for one token: a load of the summand, a store over the link,
// the poll that finds it. Of many tokens by the link, which carries a flag beside each word.
#include "comm/cuda/peer_sum.h"

#include <algorithm>

#include "comm/rank_sum.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

constexpr int kPollsBetweenLooks = 4096;  // at `ended`, which is over the bus

struct PeerJob {
  PeerView view;
  const void* in;
  void* out;
  bool in_bf16, out_bf16, sends, collects;
  int64_t num_words;
};

// Never 0, and for two calls that follow each other in the same slots never the same.
__device__ uint64_t flag_of(uint32_t call) {
  return uint64_t{call << 1 | 1u} << 32;
}

__device__ int64_t slot_of(const PeerView& view, uint32_t call, int sender, int64_t word) {
  return (int64_t{call & 1u} * view.world + sender) * view.capacity + word;
}

// Words and flags are one access of 8 bytes, which is seen whole or not at all.
__device__ uint32_t wait_for_word(const PeerView& view, volatile uint64_t* slot, uint64_t flag) {
  for (unsigned polls = 1;; ++polls) {
    const uint64_t found = *slot;
    if ((found ^ flag) >> 32 == 0) {
      *slot = 0;  // a flag is seen once, however long until its number comes again
      return static_cast<uint32_t>(found);
    }
    if (polls % kPollsBetweenLooks == 0 && *static_cast<const volatile uint32_t*>(view.ended) != 0) return 0;
  }
}

__device__ void sum_word(const PeerJob& job, uint32_t call, int64_t word) {
  const PeerView& view = job.view;
  const uint64_t flag = flag_of(call);
  float sums[2] = {0, 0};
  for (int r = 0; r < view.world; ++r) {
    const uint32_t bits = r == view.rank
                              ? static_cast<const uint32_t*>(job.in)[word]
                              : wait_for_word(view, view.slots[view.rank] + slot_of(view, call, r, word), flag);
    for (int i = 0; i < (job.in_bf16 ? 2 : 1); ++i) {
      const float value =
          job.in_bf16 ? numeric::bf16_to_float(static_cast<uint16_t>(bits >> 16 * i)) : __builtin_bit_cast(float, bits);
      sums[i] = r == 0 ? value : sums[i] + value;
    }
  }
  if (!job.in_bf16) return store_value(job.out, job.out_bf16, word, sums[0]);
  for (int i = 0; i < 2; ++i) store_value(job.out, job.out_bf16, 2 * word + i, sums[i]);
}

__global__ void __launch_bounds__(kPeerThreads) peer_sum_kernel(const PeerJob job) {
  const PeerView& view = job.view;
  const uint32_t call = view.calls[blockIdx.x];
  constexpr int64_t kStep = int64_t{kPeerBlocks} * kPeerThreads;
  const int64_t first = int64_t{blockIdx.x} * kPeerThreads + threadIdx.x;
  // All of it is sent before anything is waited for: who waits keeps nobody from sending.
  for (int64_t word = first; job.sends && word < job.num_words; word += kStep) {
    const uint64_t slot = static_cast<const uint32_t*>(job.in)[word] | flag_of(call);
    for (int r = 0; r < view.world; ++r) {
      if (r != view.rank) *static_cast<volatile uint64_t*>(view.slots[r] + slot_of(view, call, view.rank, word)) = slot;
    }
  }
  if (!job.collects) return;
  for (int64_t word = first; word < job.num_words; word += kStep) sum_word(job, call, word);
  __syncthreads();
  if (threadIdx.x == 0) view.calls[blockIdx.x] = call + 1;
}

}  // namespace

void peer_sum_on_gpu(const PeerView& view, const void* in, bool in_bf16, void* out, bool out_bf16, int64_t count,
                     void* stream, PeerPart part) {
  const int64_t num_words = in_bf16 ? count / 2 : count;
  const PeerJob job{view, in, out, in_bf16, out_bf16, part != PeerPart::kCollect, part != PeerPart::kSend, num_words};
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>((num_words + kPeerThreads - 1) / kPeerThreads, kPeerBlocks)));
  config.blockDim = dim3(kPeerThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, peer_sum_kernel, job));
}

}  // namespace tessera::comm
