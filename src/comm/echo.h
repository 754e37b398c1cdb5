// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank by itself, for measurements: of a step of many GPUs, what one of them does but for the link and for waiting.
#include <memory>

#include "comm/communicator.h"

namespace tessera::comm {

// Collectives of rank `rank` of `world` ranks without the others: what each of them would send is what this rank sends,
// so a sum is `world` times its summand, and nothing waits for anybody. Passes over memory that NCCL's way takes are
// made (a sum reads its summand `world` times), copies of other ranks' parts too. Values are of no other use. Errors:
// kUnsupported for an all_to_all whose runs there and back differ in size.
std::unique_ptr<Communicator> make_echo(int rank, int world);

}  // namespace tessera::comm
