// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of few bytes between the GPUs of one machine by one kernel that writes into the others' memory
// (cuda/peer_sum.h), in the bits that every communicator gives.
#include <cstdint>
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/communicator.h"

namespace tessera::comm {

struct PeerOptions {
  // Sums that send up to so many bytes go this way: a rank sends a sum's to each other. More are faster in shares, as
  // NCCL's are made.
  int64_t most_sent_bytes = 16 << 20;
  // Of a sum.
  int64_t most_bytes(int world) const { return most_sent_bytes / (world > 1 ? world - 1 : 1); }
  double limit_seconds = 30;  // as NcclOptions::limit_seconds
};

// `other` with its small sums made here; itself where the GPUs of the ranks (each that of the calling thread) are not
// of one machine, are more than device::kMaxPeers, or don't reach each other's memory, on every rank alike. All ranks
// call it together. All sums are queued in one queue, or behind each other. `why_not` says why it is not done.
std::unique_ptr<Communicator> make_peer(Bootstrap& bootstrap, std::unique_ptr<Communicator> other, std::string& why_not,
                                        const PeerOptions& options = {});

}  // namespace tessera::comm
