// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sum over ranks whose GPUs write into each other's memory, in one kernel. A rank writes its summand into each
// other's slots and adds up what it finds in its own: no barrier, no flag, one way over the link.
//
// A slot has two words (4 bytes each: one F32 or two BF16 values), each of which may be kNoWord, which no summand has;
// who has read them writes that back. Slots are dealt out to thread blocks in a fixed way, and each block counts its
// calls. They are there twice and used by turns. Two calls later they are free again: the call between them ended here,
// so on every other rank it had begun, and there the sum before it, which read the slots and freed them, had ended.
#include <cstdint>

#include "device/queue.h"

namespace tessera::comm {

constexpr int kMaxPeers = 8;

// Two negative NaNs of BF16, one of F32: where a summand has it, its bits travel as those of other NaNs.
constexpr uint32_t kNoWord = ~0u;

// Memory that one rank's GPU has and the others' write: slots u64 [2, world senders, capacity / 2], all words kNoWord
// at first.
struct PeerView {
  int rank = 0, world = 0;
  int64_t capacity = 0;             // words of a sum, at most; a multiple of kPeerGroupWords
  uint64_t* slots[kMaxPeers]{};     // of each rank, as this GPU reaches them
  uint32_t* calls = nullptr;        // [kPeerBlocks] of this GPU's memory, zero at first
  const uint32_t* ended = nullptr;  // in page-locked host memory; not 0: nobody waits any more, sums are undefined
};

constexpr int kPeerBlocks = 128, kPeerThreads = 256;
constexpr int kPeerGroupWords = 64;  // of a warp: slot `lane` of its group has words `lane` and 32 + `lane`

inline int64_t peer_slot_bytes(int world, int64_t capacity) {
  return 2 * int64_t{world} * capacity * static_cast<int64_t>(sizeof(uint32_t));
}

// What of a sum a kernel does. On a real GPU both; kernels that run one after another, as on one emulated GPU, can't
// wait for each other.
enum class PeerPart { kBoth, kSend, kCollect };

// out[i] = sum over ranks of in[i] in ascending order of ranks in FP32, rounded once, for i < count; `in` has a whole
// number of words, at most view.capacity. Both begin at a multiple of 4 bytes; out may be in where the types agree. All
// calls of a view are made on one queue.
void peer_sum_on_gpu(const PeerView& view, const void* in, bool in_bf16, void* out, bool out_bf16, int64_t count,
                     const device::Queue& queue, PeerPart part = PeerPart::kBoth);

}  // namespace tessera::comm
