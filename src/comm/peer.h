// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums between the GPUs of one machine by one kernel that writes into the others' memory (cuda/peer_sum.h), whole or in
// shares (peer_plan.h), in the bits that every communicator gives: compared on two GPUs, timed on up to four.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/peer_plan.h"

namespace tessera::comm {

struct PeerOptions {
  // Sums that send up to so many bytes, in the way that they are made, go this way. Larger ones are `other`'s. A rank
  // holds 2 * world / (world - 1) times as many for them: 64 MiB of two ranks, 37 of eight.
  int64_t most_sent_bytes = 16 << 20;
  double limit_seconds = 30;     // as NcclOptions::limit_seconds
  std::optional<PeerWay> way{};  // for tests and measurements: all sums in this way

  // Slots of a sender's at each receiver, whole lines.
  int64_t capacity(int world) const {
    return most_sent_bytes / std::max(world - 1, 1) / kPeerSlotBytes / kPeerLanes * kPeerLanes;
  }
  PeerPlan plan(int world, DType in, DType out, int64_t count, int64_t worth = kPeerShotBytes) const {
    const bool in_bf16 = in == DType::kBF16, out_bf16 = out == DType::kBF16;
    return way ? peer_plan(*way, world, in_bf16, out_bf16, count) : peer_plan(world, in_bf16, out_bf16, count, worth);
  }
  // Whether a kernel that sums so many values whole into BF16, in place of so many more launches, is to do so.
  bool is_fused(int world, DType in, int64_t count, int num_launches) const {
    const PeerPlan sum = plan(world, in, DType::kBF16, count, peer_fused_bytes(num_launches));
    return sum.way == PeerWay::kWhole && sum.slots <= capacity(world);
  }
};

// `other` with its small sums made here; itself where the GPUs of the ranks (each that of the calling thread) are not
// of one machine, are more than device::kMaxPeers, or don't reach each other's memory, on every rank alike. All ranks
// call it together. All sums are queued in one queue, or behind each other. `why_not` says why it is not done.
std::unique_ptr<Communicator> make_peer(Bootstrap& bootstrap, std::unique_ptr<Communicator> other, std::string& why_not,
                                        const PeerOptions& options = {});

// make_echo(), with what make_peer() does by kernels done by those kernels, on the calling thread's GPU. Throws
// kUnsupported where there is none, or for more ranks than device::kMaxPeers.
std::unique_ptr<Communicator> make_peer_echo(int rank, int world, const PeerOptions& options = {});

}  // namespace tessera::comm
