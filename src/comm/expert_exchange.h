// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory through which ranks on GPUs of one machine, each with its own tokens and its share of the experts by id,
// send each other rows and what experts gave for them (device/expert_peers.h): made once, then part of every call of
// rank_experts (ops/rank_experts).
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/cuda/peer_memory.h"
#include "device/expert_peers.h"

namespace tessera::comm {

class ExpertExchange {
 public:
  ExpertExchange(std::unique_ptr<PeerMemory> memory, const device::ExpertPeersShape& shape);
  // Waits for calls that were queued, which it lets go.
  ~ExpertExchange();

  // What kernels are given, while this lives. All calls of a rank are queued in one queue, or behind each other.
  const device::ExpertPeers& peers() const { return peers_; }
  // Nobody waits any more for a rank that does not come, and outputs are undefined from now on. From any thread: who
  // watches a group's steps calls it where one does not end, or a rank is lost.
  void end() noexcept { memory_->end(); }
  // Waits for the GPU and lets go of the other ranks' memory: once all ranks have, each may free its own.
  void disconnect() noexcept { memory_->disconnect(); }

 private:
  std::unique_ptr<PeerMemory> memory_;
  device::ExpertPeers peers_;
};

// For calls of up to shape.max_tokens tokens of each rank, on the calling thread's GPU, of which it takes
// shape.bytes(world) bytes. All ranks call it together. Null on every rank alike where GPUs of the ranks are not of one
// machine, are more than device::kMaxPeers, or don't reach each other's memory, or where ranks ask for different
// shapes: then `why_not` says so. Throws kInvalidArgument for a shape without tokens or experts, or of rows that are
// not whole slots.
std::unique_ptr<ExpertExchange> make_expert_exchange(Bootstrap& bootstrap, const device::ExpertPeersShape& shape,
                                                     std::string& why_not);

}  // namespace tessera::comm
