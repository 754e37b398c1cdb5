// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which way a sum over ranks takes through peer memory (cuda/peer_sum.h), what it sends and what it needs room for. All
// ranks decide alike, from the sum's size and types; the way changes no bit of it.
#include <cstdint>

#include "base/integer_math.h"
#include "device/peer_view.h"

namespace tessera::comm {

enum class PeerWay {
  kWhole,   // one shot: a rank sends its whole summand to each other and adds up all of it
  kShares,  // two: each rank is sent the summands of its share, adds them up and sends what they give to each other
};

// Words that a warp exchanges at once: slot `lane` of such a group has words `lane` and 32 + `lane`.
constexpr int kPeerLanes = 32, kPeerGroupWords = device::kPeerSlotWords * kPeerLanes;
constexpr int64_t kPeerSlotBytes = sizeof(uint64_t);

// Slots of so many words, whole groups.
constexpr int64_t peer_slots(int64_t num_words) {
  return round_up<int64_t>(num_words, kPeerGroupWords) / device::kPeerSlotWords;
}

// Of a view with these slots for a call.
constexpr int64_t peer_slot_bytes(int world, int64_t capacity) {
  return 2 * int64_t{world} * capacity * kPeerSlotBytes;
}

// A second shot takes 2.8 us, in which a link that carries 330 to 392 GB/s (two H200, docs/performance/several_gpus.md)
// brings about so many bytes: it has to save them. Of a sum that is made whole by a kernel together with its neighbours
// it has to save what their launches take too, 1.8 to 2.2 us each.
constexpr int64_t kPeerShotBytes = 1 << 20, kPeerLaunchBytes = 3 << 18;
constexpr int64_t peer_fused_bytes(int num_launches) {
  return kPeerShotBytes + num_launches * kPeerLaunchBytes;
}

struct PeerPlan {
  PeerWay way = PeerWay::kWhole;
  int64_t num_slots = 0;    // of the summand
  int64_t share_slots = 0;  // kShares: of a rank's share, whole groups; the last shares may have fewer, or none
  int64_t slots = 0;        // of a sender's at each receiver
  // By each rank to all others.
  constexpr int64_t sent_bytes(int world) const { return (world - 1) * slots * kPeerSlotBytes; }
  constexpr int num_shots() const { return way == PeerWay::kShares ? 2 : 1; }
};

// A sum of `count` values that is made in this way. BF16 values come in pairs.
constexpr PeerPlan peer_plan(PeerWay way, int world, bool in_bf16, bool out_bf16, int64_t count) {
  const int64_t num_slots = peer_slots(in_bf16 ? count / 2 : count);
  if (way == PeerWay::kWhole) return {way, num_slots, 0, num_slots};
  const int64_t share = round_up<int64_t>(ceil_div<int64_t>(num_slots, world), kPeerLanes);
  // Behind the summands of a share lies what they give, in half or twice as many bytes where the types differ.
  const int64_t finished = in_bf16 == out_bf16 ? share : out_bf16 ? share / 2 : 2 * share;
  return {way, num_slots, share, share + finished};
}

// In the way that is expected to be faster: in shares where they save `worth` bytes.
constexpr PeerPlan peer_plan(int world, bool in_bf16, bool out_bf16, int64_t count, int64_t worth = kPeerShotBytes) {
  const PeerPlan whole = peer_plan(PeerWay::kWhole, world, in_bf16, out_bf16, count);
  const PeerPlan shares = peer_plan(PeerWay::kShares, world, in_bf16, out_bf16, count);
  return whole.sent_bytes(world) - shares.sent_bytes(world) > worth ? shares : whole;
}

}  // namespace tessera::comm
