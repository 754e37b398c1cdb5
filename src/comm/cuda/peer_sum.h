// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sum over ranks whose GPUs write into each other's memory, in one kernel. A rank writes its summand into each
// other's slots and adds up what it finds in its own (device/cuda/peer_exchange.cuh).
#include <cstdint>

#include "base/integer_math.h"
#include "device/peer_view.h"
#include "device/queue.h"

namespace tessera::comm {

// Words that a warp exchanges at once: slot `lane` of such a group has words `lane` and 32 + `lane`.
constexpr int kPeerGroupWords = 64;

// Slots of a sum of so many words.
inline int64_t peer_slots(int64_t num_words) {
  return round_up<int64_t>(num_words, kPeerGroupWords) / device::kPeerSlotWords;
}

// Of a view with these slots for a call.
inline int64_t peer_slot_bytes(int world, int64_t capacity) {
  return 2 * int64_t{world} * capacity * static_cast<int64_t>(sizeof(uint64_t));
}

// What of a sum a kernel does. On a real GPU both; kernels that run one after another, as on one emulated GPU, can't
// wait for each other.
enum class PeerPart { kBoth, kSend, kCollect };

// out[i] = sum over ranks of in[i] in ascending order of ranks in FP32, rounded once, for i < count; `in` has a whole
// number of words, of at most view.capacity slots. Both begin at a multiple of 4 bytes; out may be in where the types
// agree. All calls of a view are made on one queue.
void peer_sum_on_gpu(const device::PeerView& view, const void* in, bool in_bf16, void* out, bool out_bf16,
                     int64_t count, const device::Queue& queue, PeerPart part = PeerPart::kBoth);

}  // namespace tessera::comm
