// SPDX-License-Identifier: Apache-2.0
// Sums over ranks through peer memory. Bound by latency for one token: a load of the summand, a store over the link,
// the poll that finds it; in shares a second store and poll. Of many tokens by the link, which carries summands, and
// what shares give, and nothing else.
#include "comm/cuda/peer_sum.h"

#include <algorithm>
#include <type_traits>

#include "device/cuda/check.h"
#include "device/cuda/peer_exchange.cuh"
#include "numeric/bf16.h"

namespace tessera::comm {

namespace {

using namespace device::cuda;
using device::PeerView, device::kMaxPeers, device::kPeerSlotWords;

// One block to a multiprocessor, and all in place at once where there are as many; a block waits for the block of its
// own number on other ranks alone, so that with fewer those that began first still end first. Many threads keep the
// link busy, of few sums small blocks begin sooner.
constexpr int kMostBlocks = 128, kFewestThreads = 256, kMostThreads = 1024;
static_assert(kFewestThreads % kPeerLanes == 0);

struct PeerJob {
  PeerView view;
  const void* in;
  void* out;
  bool sends, adds, collects;
  int64_t num_words, num_slots;
  int64_t share_slots;  // 0: whole
};

// Word i of a slot.
__device__ int64_t word_of(int64_t slot, int i) {
  return slot / kPeerLanes * kPeerGroupWords + i * kPeerLanes + slot % kPeerLanes;
}

// What this rank adds at a slot; behind the end anything.
__device__ uint64_t own_words(const PeerJob& job, int64_t slot) {
  const auto word = [&](int i) {
    const int64_t at = word_of(slot, i);
    return at < job.num_words ? static_cast<const uint32_t*>(job.in)[at] : 0;
  };
  return peer_words(word(0), word(1));
}

// function(r) for each rank, r a constant: what an array has of each is kept in registers.
template <class Function>
__device__ void for_ranks(const PeerView& view, const Function& function) {
#pragma unroll
  for (int r = 0; r < kMaxPeers; ++r) {
    if (r >= view.world) break;
    function(r);
  }
}

// function(k, r) for each other rank r, the next one first, so that not all send to the same; k, a constant, counts.
template <class Function>
__device__ void for_others(const PeerView& view, const Function& function) {
#pragma unroll
  for (int k = 0; k < kMaxPeers - 1; ++k) {
    if (k + 1 >= view.world) break;
    const int r = view.rank + 1 + k;
    function(k, r < view.world ? r : r - view.world);
  }
}

// Values of a slot's words, two of a word where they are BF16.
struct Sums {
  float v[kPeerSlotWords][2];
};

template <bool kInBf16>
__device__ void add_words(uint64_t words, bool is_first, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kPeerSlotWords; ++i) {
    const auto bits = static_cast<uint32_t>(words >> 32 * i);
    const float values[2] = {
        kInBf16 ? numeric::bf16_to_float(static_cast<uint16_t>(bits)) : __builtin_bit_cast(float, bits),
        kInBf16 ? numeric::bf16_to_float(static_cast<uint16_t>(bits >> 16)) : 0.0f};
#pragma unroll
    for (int n = 0; n < 2; ++n) sums.v[i][n] = is_first ? values[n] : sums.v[i][n] + values[n];
  }
}

// The sum of this rank's `own` and of what the others sent to slot `at`. First loads are on their way together.
template <bool kInBf16>
__device__ Sums sum_of_ranks(const PeerView& view, uint32_t call, uint64_t own, int64_t at) {
  uint64_t found[kMaxPeers];
  for_ranks(view, [&](int r) {
    if (r != view.rank) found[r] = *peer_slot(view, view.rank, r, call, at);
  });
  Sums sums;
  for_ranks(view, [&](int r) {
    const uint64_t words =
        r == view.rank ? own : wait_for_peer_words(view, peer_slot(view, view.rank, r, call, at), found[r]);
    add_words<kInBf16>(words, r == 0, sums);
  });
  return sums;
}

__device__ uint32_t bf16_word(float first, float second) {
  return uint32_t{numeric::bf16_from_float(second)} << 16 | numeric::bf16_from_float(first);
}

__device__ uint64_t f32_words(float first, float second) {
  return peer_words(__builtin_bit_cast(uint32_t, first), __builtin_bit_cast(uint32_t, second));
}

// What a slot's sums are, rounded, as it travels and is stored: of one word where F32 becomes BF16, of four where BF16
// becomes F32, else of two.
template <bool kInBf16, bool kOutBf16>
struct Result {
  static constexpr bool kIsHalf = !kInBf16 && kOutBf16;
  static constexpr int kUnits = kInBf16 && !kOutBf16 ? 2 : 1;
  using Unit = std::conditional_t<kIsHalf, uint32_t, uint64_t>;
  Unit units[kUnits];

  __device__ static Result of(const Sums& sums) {
    const auto& v = sums.v;
    if constexpr (kIsHalf) {
      return {{peer_word(bf16_word(v[0][0], v[1][0]))}};
    } else if constexpr (kUnits == 2) {
      return {{f32_words(v[0][0], v[0][1]), f32_words(v[1][0], v[1][1])}};
    } else if constexpr (kOutBf16) {
      return {{peer_words(bf16_word(v[0][0], v[0][1]), bf16_word(v[1][0], v[1][1]))}};
    } else {
      return {{f32_words(v[0][0], v[1][0])}};
    }
  }

  __device__ void store(const PeerJob& job, int64_t slot) const {
#pragma unroll
    for (int i = 0; i < kPeerSlotWords; ++i) {
      const int64_t at = word_of(slot, i);
      if (at >= job.num_words) return;
      if constexpr (kIsHalf) {
        static_cast<uint16_t*>(job.out)[at] = static_cast<uint16_t>(units[0] >> 16 * i);
      } else if constexpr (kUnits == 1) {
        static_cast<uint32_t*>(job.out)[at] = static_cast<uint32_t>(units[0] >> 32 * i);
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          static_cast<uint32_t*>(job.out)[2 * at + n] = static_cast<uint32_t>(units[i] >> 32 * n);
        }
      }
    }
  }
};

// May be in place before the kernel before it has ended, as kernels of backends are, and lets the next one be so, whose
// blocks take no place from these: all of them have theirs by then.
__device__ uint32_t begin(const PeerJob& job) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  return begin_peer_call(job.view);
}

// --- Whole ---

__device__ void send_whole(const PeerJob& job, uint32_t call, int64_t slot) {
  if (slot >= job.num_slots) return;
  const uint64_t words = own_words(job, slot);
  for_others(job.view, [&](int, int r) { *peer_slot(job.view, r, job.view.rank, call, slot) = words; });
}

template <bool kInBf16, bool kOutBf16>
__global__ void __launch_bounds__(kMostThreads) peer_sum_kernel(const __grid_constant__ PeerJob job) {
  const uint32_t call = begin(job);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (job.sends) send_whole(job, call, slot);
  // What is waited for next is sent before: while words are on the link those before them are added up.
  for (; slot < job.num_slots; slot += step) {
    if (job.sends) send_whole(job, call, slot + step);
    if (!job.collects) continue;
    const Sums sums = sum_of_ranks<kInBf16>(job.view, call, own_words(job, slot), slot);
    Result<kInBf16, kOutBf16>::of(sums).store(job, slot);
  }
  if (job.collects) end_peer_call(job.view, call, gridDim.x);
}

// --- Shares ---

// Slot `at` of rank r's share; num_slots or more behind the last.
__device__ int64_t share_slot(const PeerJob& job, int r, int64_t at) {
  return r * job.share_slots + at;
}

// Where `receiver` finds what slot `at` of the share of `sender` gives: behind the summands.
template <class Result>
__device__ auto result_place(const PeerJob& job, int receiver, int sender, uint32_t call, int64_t at, int unit) {
  volatile uint64_t* results = peer_slot(job.view, receiver, sender, call, job.share_slots);
  return reinterpret_cast<volatile typename Result::Unit*>(results) + unit * job.share_slots + at;
}

__device__ void send_shares(const PeerJob& job, uint32_t call, int64_t at) {
  uint64_t words[kMaxPeers];
  for_others(job.view, [&](int k, int r) { words[k] = own_words(job, share_slot(job, r, at)); });
  for_others(job.view, [&](int k, int r) {
    if (share_slot(job, r, at) < job.num_slots) *peer_slot(job.view, r, job.view.rank, call, at) = words[k];
  });
}

template <bool kInBf16, class Result>
__device__ void add_share(const PeerJob& job, uint32_t call, int64_t at) {
  const int64_t slot = share_slot(job, job.view.rank, at);
  if (slot >= job.num_slots) return;
  const Result result = Result::of(sum_of_ranks<kInBf16>(job.view, call, own_words(job, slot), at));
  for_others(job.view, [&](int, int r) {
#pragma unroll
    for (int u = 0; u < Result::kUnits; ++u) {
      *result_place<Result>(job, r, job.view.rank, call, at, u) = result.units[u];
    }
  });
  result.store(job, slot);
}

template <class Result>
__device__ void collect_shares(const PeerJob& job, uint32_t call, int64_t at) {
  Result results[kMaxPeers];
  const auto is_sent = [&](int r) { return r != job.view.rank && share_slot(job, r, at) < job.num_slots; };
  const auto place = [&](int r, int u) { return result_place<Result>(job, job.view.rank, r, call, at, u); };
  for_ranks(job.view, [&](int r) {
    if (!is_sent(r)) return;
#pragma unroll
    for (int u = 0; u < Result::kUnits; ++u) results[r].units[u] = *place(r, u);
  });
  for_ranks(job.view, [&](int r) {
    if (!is_sent(r)) return;
#pragma unroll
    for (int u = 0; u < Result::kUnits; ++u) {
      results[r].units[u] = wait_for_peer_words(job.view, place(r, u), results[r].units[u]);
    }
    results[r].store(job, share_slot(job, r, at));
  });
}

// A thread has the same slots of each share. It sends all that it has before it waits for summands, and all that its
// share gives before it waits for what the others' give: what is waited for never waits for who waits. `in` may be
// `out`, since all of a slot is read before its thread stores there.
template <bool kInBf16, bool kOutBf16>
__global__ void __launch_bounds__(kMostThreads) peer_shares_kernel(const __grid_constant__ PeerJob job) {
  using Sum = Result<kInBf16, kOutBf16>;
  const uint32_t call = begin(job);
  const auto for_slots = [&](const auto& function) {
    const int64_t step = int64_t{gridDim.x} * blockDim.x;
    for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < job.share_slots; at += step) function(at);
  };
  if (job.sends) for_slots([&](int64_t at) { send_shares(job, call, at); });
  if (job.adds) for_slots([&](int64_t at) { add_share<kInBf16, Sum>(job, call, at); });
  if (job.collects) {
    for_slots([&](int64_t at) { collect_shares<Sum>(job, call, at); });
    end_peer_call(job.view, call, gridDim.x);
  }
}

// --- Launch ---

template <bool kInBf16, bool kOutBf16>
void launch(const PeerJob& job, const device::Queue& queue) {
  const int64_t items = job.share_slots > 0 ? job.share_slots : job.num_slots;  // a thread's, one after another
  const int64_t threads = std::clamp<int64_t>(round_up<int64_t>(ceil_div<int64_t>(items, kMostBlocks), kPeerLanes),
                                              kFewestThreads, kMostThreads);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(items, threads), kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(queue.stream());
  if (queue.overlaps_kernels()) config.attrs = &overlap, config.numAttrs = 1;
  const auto kernel = job.share_slots > 0 ? peer_shares_kernel<kInBf16, kOutBf16> : peer_sum_kernel<kInBf16, kOutBf16>;
  TESSERA_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, job));
}

}  // namespace

void peer_sum_on_gpu(const PeerView& view, PeerWay way, const void* in, bool in_bf16, void* out, bool out_bf16,
                     int64_t count, const device::Queue& queue, PeerPart part) {
  const PeerPlan plan = peer_plan(way, view.world, in_bf16, out_bf16, count);
  const auto does = [&](PeerPart one) { return part == one || part == PeerPart::kAll; };
  const PeerJob job{.view = view,
                    .in = in,
                    .out = out,
                    .sends = does(PeerPart::kSend),
                    .adds = does(PeerPart::kAdd),
                    .collects = does(PeerPart::kCollect),
                    .num_words = in_bf16 ? count / 2 : count,
                    .num_slots = plan.num_slots,
                    .share_slots = plan.share_slots};
  if (in_bf16) {
    out_bf16 ? launch<true, true>(job, queue) : launch<true, false>(job, queue);
  } else {
    out_bf16 ? launch<false, true>(job, queue) : launch<false, false>(job, queue);
  }
}

}  // namespace tessera::comm
