// SPDX-License-Identifier: Apache-2.0
#pragma once
// How kernels of ranks exchange summands through each other's memory (peer_view.h): no barrier, no flag, one way over
// the link. A kernel's blocks are all in place at once, or those that wait could keep others from sending; each thread
// sends what it has for a slot before it waits for that slot.
#include <cstdint>

#include "base/host_device.h"
#include "device/peer_view.h"

namespace tessera::device::cuda {

constexpr int kPollsBetweenLooks = 4096;  // at `ended`, which is over the bus
constexpr uint64_t kNoPeerWords = ~uint64_t{0};

// The number of this call; what follows happens in its half of the slots.
__device__ inline uint32_t begin_peer_call(const PeerView& view) {
  return *view.calls;
}

// By all threads of every block, at their end. `finish()`: what is done once all blocks have come so far.
template <class Finish>
__device__ void end_peer_call(const PeerView& view, uint32_t call, const Finish& finish) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(view.calls + 1, 1u) + 1 != gridDim.x) return;
  finish();
  view.calls[0] = call + 1, view.calls[1] = 0;
}
__device__ inline void end_peer_call(const PeerView& view, uint32_t call) {
  end_peer_call(view, call, [] {});
}

// As they travel: a NaN that means none goes with another sign, or of two BF16 the second does.
__device__ inline uint64_t peer_words(uint32_t first, uint32_t second) {
  if (first == kNoPeerWord) first = kNoPeerWord >> 1;
  if (second == kNoPeerWord) second = kNoPeerWord >> 1;
  return uint64_t{second} << 32 | first;
}

// Where `receiver` finds what `sender` sends.
__device__ inline volatile uint64_t* peer_slot(const PeerView& view, int receiver, int sender, uint32_t call,
                                               int64_t slot) {
  return view.slots[receiver] + (int64_t{call & 1u} * view.world + sender) * view.capacity + slot;
}

// Each word is seen whole or not at all, both of them in any order. `words`: what was found at `slot` first, so that
// several slots' first loads can be on their way together. 0 once the group has ended. The words stay.
__device__ inline uint64_t see_peer_words(const PeerView& view, const volatile uint64_t* slot, uint64_t words) {
  const auto is_whole = [](uint64_t found) {
    return static_cast<uint32_t>(found) != kNoPeerWord && static_cast<uint32_t>(found >> 32) != kNoPeerWord;
  };
  for (unsigned polls = 1; !is_whole(words); ++polls) {
    if (polls % kPollsBetweenLooks == 0 && *static_cast<const volatile uint32_t*>(view.ended) != 0) return 0;
    words = *slot;
  }
  return words;
}

// The same, and the slot is free again.
__device__ inline uint64_t wait_for_peer_words(const PeerView& view, volatile uint64_t* slot, uint64_t words) {
  words = see_peer_words(view, slot, words);
  *slot = kNoPeerWords;
  return words;
}

}  // namespace tessera::device::cuda
