// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives between GPUs through NCCL, which moves bytes; sums are ours (rank_sum.h).
#include <cstdint>
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "device/memory_space.h"

namespace tessera::comm {

// Sums of so many bytes and more are made in shares, each by one rank, and gathered: two calls, 2 / world of the bytes.
constexpr int64_t kNcclShareBytes = 256 << 10;

struct NcclOptions {
  std::string library = "libnccl.so.2";
  // What sums gather into, taken once. Larger calls are made in pieces of it: the bits are the same.
  int64_t scratch_bytes = 64 << 20;
  double join_seconds = 120;
  // What is queued has to end in this time once somebody waits for it, or the communicator is aborted.
  double limit_seconds = 30;
};

// A communicator of all ranks of the bootstrap, one GPU each: that of the calling thread, whose memory is `memory`. All
// ranks call it together. A thread of its own watches for errors and for calls that don't end, and aborts, so that who
// waits for the queue comes back; begin_step() and end_step() stand around each such wait, since a recorded step makes
// no calls. An abort waits for recordings that have the communicator: destroy them once end_step() has thrown. NCCL
// reads NCCL_* from the environment (NCCL_NVLS_ENABLE=0 keeps NVLink multicast off). Throws kDeviceError where NCCL is
// missing or does not come up.
std::unique_ptr<Communicator> make_nccl(Bootstrap& bootstrap, device::MemorySpace& memory,
                                        const NcclOptions& options = {});

}  // namespace tessera::comm
