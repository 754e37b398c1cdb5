// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of GPUs that write into each other's, as one of them sees it: plain data that comm makes and kernels take
// (cuda/peer_exchange.cuh).
#include <cstdint>

namespace tessera::device {

constexpr int kMaxPeers = 8;

// Slots u64 [2, world senders, capacity]. A slot has two words (4 bytes each: one F32 or two BF16 values), each of
// which may be kNoPeerWord, which no sender sends; who has read them writes that back. A call is a kernel on every rank
// that reads all words sent to it in that call, and does not end before all ranks have begun it: because it waits for a
// word of each, or (sums in shares) for a word that another made once it had those of all. Where several blocks read
// the same words, the kernel behind it, which writes them back, is part of the call. What a call sends in a
// second shot has slots of its own beside those of the first. All ranks run the same kernel in a call: where a word of
// a sum lies differs between comm/cuda/peer_sum.cu and backends/cuda_common/peer_packs.cuh. Calls use the two halves by
// turns, each as it likes: two calls later the slots are free again, since the call between them ended here, so on
// every other rank it had begun, and there the call before it, which read the slots and freed them, had ended.
struct PeerView {
  int rank = 0, world = 0;
  int64_t capacity = 0;             // slots of a call, at most
  uint64_t* slots[kMaxPeers]{};     // of each rank, as this GPU reaches them; all words kNoPeerWord at first
  uint32_t* calls = nullptr;        // of this GPU's memory: calls that have ended, blocks that have ended the next one
  const uint32_t* ended = nullptr;  // in page-locked host memory; not 0: nobody waits any more, sums are undefined
};

// Two negative NaNs of BF16, one of F32: where a summand has it, its bits travel as those of other NaNs.
constexpr uint32_t kNoPeerWord = ~0u;
constexpr int kPeerSlotWords = 2, kPeerCounters = 2;

}  // namespace tessera::device
