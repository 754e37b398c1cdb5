// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of GPUs whose ranks share out experts by id, as one of them sees it: plain data that comm makes
// (comm/expert_exchange.h) and kernels take. Of each rank there is an area that others send tokens' rows into, and
// behind it one into which owners of experts write what those gave for this rank's tokens.
#include <cstdint>

#include "base/host_device.h"
#include "base/integer_math.h"
#include "device/peer_view.h"

namespace tessera::device {

// What a call may be at most; all ranks say the same. Slots are those of peer_view.h: two words, here four BF16 values.
struct ExpertPeersShape {
  int64_t max_tokens = 0;  // of a rank in a call
  int64_t top_k = 0, hidden = 0;

  static constexpr int64_t kValues = 4;         // of a slot
  static constexpr int64_t kAlignedSlots = 16;  // 128 bytes

  // Sent by a rank to another in a call: a slot with the number of its tokens, behind it their choices (a slot each: id
  // and weight), behind them their rows, of those that the receiver has an expert of.
  TESSERA_HOST_DEVICE int64_t choice_slot(int64_t token, int64_t k) const { return kAlignedSlots + token * top_k + k; }
  TESSERA_HOST_DEVICE int64_t row_slots() const { return hidden / kValues; }
  TESSERA_HOST_DEVICE int64_t row_slot(int64_t token) const {
    return kAlignedSlots + round_up<int64_t>(max_tokens * top_k, kAlignedSlots) + token * row_slots();
  }
  TESSERA_HOST_DEVICE int64_t sent_slots() const { return row_slot(max_tokens); }
  // Returned: [tokens, top_k, hidden].
  TESSERA_HOST_DEVICE int64_t returned_slots() const { return max_tokens * top_k * row_slots(); }
  // Of a rank's memory: 2 world (128 + 8 C K + 2 C H) + 2 C K H, for C tokens, K experts of each and rows of H values.
  int64_t bytes(int world) const {
    return (2 * int64_t{world} * sent_slots() + returned_slots()) * static_cast<int64_t>(sizeof(uint64_t));
  }
};

// A call has three parts. Every rank sends its rows to all others (dispatch); each waits for the rows of all ranks and
// writes what its experts give into the areas of those whose tokens they are (experts); each waits for its own tokens'
// slots (combine). All words are kNoPeerWord between calls, but for rows that came early for the next one.
//
// Rows have two halves, by turns (view.slots, a call being a dispatch with its collection): in each call each rank
// waits for the number of tokens of every other, so the argument of peer_view.h holds, whoever has tokens or none.
// Returned slots need one: an owner writes a call's once it has had every rank's number of tokens of that call, which a
// rank sends after its combine of the call before has ended, which put the words back.
struct ExpertPeers {
  PeerView view;  // capacity: shape.sent_slots()
  ExpertPeersShape shape;

  // Where owners of experts write what they gave for `rank`'s tokens.
  TESSERA_HOST_DEVICE uint64_t* returned(int rank) const {
    return view.slots[rank] + 2 * int64_t{view.world} * view.capacity;
  }
};

}  // namespace tessera::device
