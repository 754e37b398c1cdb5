// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of a GPU that the other ranks' GPUs on its machine write into.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/peer_view.h"

namespace tessera::comm {

struct PeerMemorySize {
  int64_t capacity = 0;    // slots of a call, at most
  int64_t more_slots = 0;  // behind those of both halves; all their words are kNoPeerWord at first too
};

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // What the other ranks need to reach it, in a form of fixed size.
  virtual std::vector<uint8_t> address() const = 0;
  // Takes the addresses of all ranks, by rank; empty, or why one of them can't be reached from here.
  virtual std::string connect(std::span<const std::vector<uint8_t>> addresses) = 0;
  // In place of connect(), for measurements (comm/echo.h): what this rank sends another lies where that one's would, so
  // that a kernel finds all that it waits for. Not for sums in shares of different sizes.
  virtual void connect_to_itself() = 0;
  // Once connected.
  virtual const device::PeerView& view() const = 0;
  // So many F32 zeros of this rank, to add up where only waiting for each other matters.
  static constexpr int64_t kNumZeros = 4;
  virtual void* zeros() const = 0;
  // Nobody waits any more. From any thread.
  virtual void end() noexcept = 0;
  // Waits for the GPU and lets go of the other ranks' memory, which they may free from then on. No call follows.
  virtual void disconnect() noexcept = 0;
};

// On the calling thread's GPU. Null where this build can't: then `why_not` is set.
std::unique_ptr<PeerMemory> make_peer_memory(int rank, int world, const PeerMemorySize& size, std::string& why_not);

}  // namespace tessera::comm
