// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives between processes that compute on CPUs, through the bootstrap's connections: for tests, for trying
// several ranks without a GPU, and where one machine's memory is too small. Not for speed: every array goes to rank 0
// and from there to all, sealed, and every rank makes the whole sum.
#include <memory>

#include "comm/bootstrap.h"
#include "comm/communicator.h"

namespace tessera::comm {

// A communicator of all ranks of the bootstrap, which outlives it. A rank that does not come to a collective within
// `limit_seconds` is named by the exception; abort() is the bootstrap's fail(). Who comes with another collective than
// this rank's, or with one of another order (Bootstrap::num_orders), is refused on both sides.
std::unique_ptr<Communicator> make_tcp(Bootstrap& bootstrap, double limit_seconds = 30);

}  // namespace tessera::comm
