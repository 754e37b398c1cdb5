// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks as threads of one process, in host memory: for tests, and for a model cut over the sockets of one machine.
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

// One communicator for each of `world` ranks, to be used by a thread each. A rank that waits longer than
// `limit_seconds` for another, or for one whose communicator is gone, throws kDeviceError naming it; so do all others
// then.
std::vector<std::unique_ptr<Communicator>> make_loopback(int world, double limit_seconds = 30);

}  // namespace tessera::comm
