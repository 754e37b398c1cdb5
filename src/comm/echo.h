// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank by itself, for measurements: of a step of many GPUs, what one of them does but for the link and for waiting.
#include <memory>

#include "comm/communicator.h"

namespace tessera::comm {

// Collectives of rank `rank` of `world` ranks without the others: what each of them would send is what this rank sends,
// or (reduce_scatter) what it has for others, and nothing waits for anybody. Where NCCL moves bytes and a kernel adds
// them, the kernel is here, and copies stand for NCCL's own. Values are of no other use.
// Errors: kUnsupported for an all_to_all whose runs there and back differ in size.
std::unique_ptr<Communicator> make_echo(int rank, int world);

}  // namespace tessera::comm
