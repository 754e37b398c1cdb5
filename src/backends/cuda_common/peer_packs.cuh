// SPDX-License-Identifier: Apache-2.0
#pragma once
// Values as they travel between GPUs (device/cuda/peer_exchange.cuh), four of a row by a thread: BF16 in a slot, F32 in
// two; and sums over ranks of such.
#include <cstdint>

#include "backends/cuda_common/streams.cuh"
#include "device/cuda/peer_exchange.cuh"

namespace tessera::backends::cuda_common {

constexpr int kPeerValues = 4;

__device__ inline uint64_t slot_words(const Pack<kPeerValues>& values) {
  const auto word = [&](int n) {
    return uint32_t{numeric::bf16_from_float(values.v[n + 1])} << 16 | numeric::bf16_from_float(values.v[n]);
  };
  return device::cuda::peer_words(word(0), word(2));
}

__device__ inline Pack<kPeerValues> slot_values(uint64_t words) {
  Pack<kPeerValues> values;
#pragma unroll
  for (int n = 0; n < kPeerValues; ++n) {
    values.v[n] = numeric::bf16_to_float(static_cast<uint16_t>(words >> 16 * n));
  }
  return values;
}

// A rank's summand of so many values, a multiple of kPeerRun where they are F32: the two slots of four values lie
// apart, so that what a warp stores at once is without gaps.
constexpr int64_t kPeerRun = 128;

template <bool kIsF32>
struct PeerSummand {
  static constexpr int kSlots = kIsF32 ? 2 : 1;
  TESSERA_HOST_DEVICE static int64_t num_slots(int64_t num_values) { return num_values / kPeerValues * kSlots; }
  // Slot n of the values from i on.
  __device__ static int64_t slot(int64_t i, int n) {
    if constexpr (!kIsF32) return i / kPeerValues;
    constexpr int64_t kApart = kPeerRun / kPeerValues;
    return i / kPeerRun * kSlots * kApart + n * kApart + i % kPeerRun / kPeerValues;
  }

  uint64_t words[kSlots];

  __device__ static PeerSummand of(const Pack<kPeerValues>& values) {
    if constexpr (kIsF32) {
      const auto words = [&](int n) {
        return device::cuda::peer_words(__float_as_uint(values.v[n]), __float_as_uint(values.v[n + 1]));
      };
      return {{words(0), words(2)}};
    } else {
      return {{slot_words(values)}};
    }
  }
  __device__ Pack<kPeerValues> values() const {
    if constexpr (kIsF32) {
      const auto value = [&](int n) { return __uint_as_float(static_cast<uint32_t>(words[n / 2] >> n % 2 * 32)); };
      return {{value(0), value(1), value(2), value(3)}};
    } else {
      return slot_values(words[0]);
    }
  }
};

// Values from i on to all other ranks.
template <bool kIsF32>
__device__ void send_to_ranks(const device::PeerView& peers, uint32_t call, int64_t i,
                              const Pack<kPeerValues>& values) {
  using Summand = PeerSummand<kIsF32>;
  const Summand own = Summand::of(values);
  for (int r = 0; r < peers.world; ++r) {
    if (r == peers.rank) continue;
#pragma unroll
    for (int n = 0; n < Summand::kSlots; ++n) {
      *device::cuda::peer_slot(peers, r, peers.rank, call, Summand::slot(i, n)) = own.words[n];
    }
  }
}

// The sum of own(), this rank's values from i on, and of what the others sent, in ascending order of ranks, rounded to
// BF16. All ranks, this one too, add the words that travel. kFrees: the slots are free again; else a kernel behind this
// one sees to that (free_slots), and others may look there too. kAtOnce: ranks whose first loads are on their way
// together.
template <bool kIsF32, bool kFrees, int kAtOnce, class Own>
__device__ Pack<kPeerValues> sum_of_ranks(const device::PeerView& peers, uint32_t call, int64_t i, const Own& own) {
  using Summand = PeerSummand<kIsF32>;
  const auto place = [&](int r, int n) {
    return device::cuda::peer_slot(peers, peers.rank, r, call, Summand::slot(i, n));
  };
  Pack<kPeerValues> sum;
  for (int first = 0; first < peers.world; first += kAtOnce) {
    Summand found[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= peers.world) break;
      if (first + k == peers.rank) {
        found[k] = Summand::of(own());
        continue;
      }
#pragma unroll
      for (int n = 0; n < Summand::kSlots; ++n) found[k].words[n] = *place(first + k, n);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= peers.world) break;
      if (first + k != peers.rank) {
#pragma unroll
        for (int n = 0; n < Summand::kSlots; ++n) {
          uint64_t& words = found[k].words[n];
          words = kFrees ? device::cuda::wait_for_peer_words(peers, place(first + k, n), words)
                         : device::cuda::see_peer_words<uint64_t>(peers, place(first + k, n), words);
        }
      }
      const Pack<kPeerValues> part = found[k].values();
#pragma unroll
      for (int n = 0; n < kPeerValues; ++n) sum.v[n] = first + k == 0 ? part.v[n] : sum.v[n] + part.v[n];
    }
  }
  round_pack(true, sum);
  return sum;
}

// By a kernel behind the one that has read them: slots of so many values of each other rank are free, and the call has
// ended. Blocks [first, gridDim.x) share them.
template <bool kIsF32>
__device__ void free_slots(const device::PeerView& peers, int64_t num_values, unsigned first) {
  const uint32_t call = device::cuda::begin_peer_call(peers);
  const int64_t slots = PeerSummand<kIsF32>::num_slots(num_values);
  const unsigned blocks = gridDim.x - first;
  for (int r = 0; r < peers.world; ++r) {
    if (r == peers.rank) continue;
    for (int64_t slot = int64_t{blockIdx.x - first} * blockDim.x + threadIdx.x; slot < slots;
         slot += int64_t{blocks} * blockDim.x) {
      *device::cuda::peer_slot(peers, peers.rank, r, call, slot) = device::cuda::kNoPeerWords;
    }
  }
  device::cuda::end_peer_call(peers, call, blocks);
}

}  // namespace tessera::backends::cuda_common
