// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of a rank's GPU that the GPUs of all other ranks reach, or of none.
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/cuda/peer_memory.h"

namespace tessera::comm {

// Of the calling thread's GPU; all ranks call it together, with the same size. Null on every rank alike where one of
// them can't: then `why_not` is the first one's reason.
std::unique_ptr<PeerMemory> make_connected_memory(Bootstrap& bootstrap, const PeerMemorySize& size,
                                                  std::string& why_not);

}  // namespace tessera::comm
