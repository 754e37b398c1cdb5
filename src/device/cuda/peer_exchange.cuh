// SPDX-License-Identifier: Apache-2.0
#pragma once
// How kernels of ranks exchange words through each other's memory (peer_view.h): no barrier, no flag, one way over the
// link. A block waits for the block of its own number on other ranks alone, or a kernel's blocks are all in place at
// once: otherwise those that wait could keep others from sending. Each thread sends what it has for a slot before it
// waits for that slot.
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

// By all threads of so many blocks, at their end. `finish()`: what is done once all of them have come so far.
template <class Finish>
__device__ void end_peer_call(const PeerView& view, uint32_t call, unsigned num_blocks, const Finish& finish) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(view.calls + 1, 1u) + 1 != num_blocks) return;
  finish();
  view.calls[0] = call + 1, view.calls[1] = 0;
}
__device__ inline void end_peer_call(const PeerView& view, uint32_t call, unsigned num_blocks) {
  end_peer_call(view, call, num_blocks, [] {});
}

// As it travels: a NaN that means none goes with another sign, or of two BF16 the second does.
__device__ inline uint32_t peer_word(uint32_t word) {
  return word == kNoPeerWord ? kNoPeerWord >> 1 : word;
}
__device__ inline uint64_t peer_words(uint32_t first, uint32_t second) {
  return uint64_t{peer_word(second)} << 32 | peer_word(first);
}

// Where `receiver` finds what `sender` sends.
__device__ inline volatile uint64_t* peer_slot(const PeerView& view, int receiver, int sender, uint32_t call,
                                               int64_t slot) {
  return view.slots[receiver] + (int64_t{call & 1u} * view.world + sender) * view.capacity + slot;
}

// Words is one (uint32_t) or a slot's two (uint64_t): each is seen whole or not at all, both of them in any order.
// `words`: what was found at `place` first, so that several places' first loads can be on their way together. 0 once
// the group has ended. The words stay.
template <class Words>
__device__ inline Words see_peer_words(const PeerView& view, const volatile Words* place, Words words) {
  const auto is_whole = [](uint64_t found) {
    return static_cast<uint32_t>(found) != kNoPeerWord &&
           (sizeof(Words) == sizeof(uint32_t) || static_cast<uint32_t>(found >> 32) != kNoPeerWord);
  };
  for (unsigned polls = 1; !is_whole(words); ++polls) {
    if (polls % kPollsBetweenLooks == 0 && *static_cast<const volatile uint32_t*>(view.ended) != 0) return 0;
    words = *place;
  }
  return words;
}

// The same, and the place is free again.
template <class Words>
__device__ inline Words wait_for_peer_words(const PeerView& view, volatile Words* place, Words words) {
  words = see_peer_words(view, place, words);
  *place = ~Words{0};
  return words;
}

}  // namespace tessera::device::cuda
