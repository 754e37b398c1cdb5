// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sum over ranks whose GPUs write into each other's memory, in one kernel (device/cuda/peer_exchange.cuh). Whole: a
// rank writes its summand into each other's slots and adds up what it finds in its own. In shares: it writes of its
// summand each other's share there, adds up its own, writes what that gives behind the summands of each other, and
// stores what it finds of theirs. Either way every value is added up in the same order and rounded once, and all ranks
// store what travelled: the same bits, those of NaNs too.
#include <cstdint>

#include "comm/peer_plan.h"
#include "device/peer_view.h"
#include "device/queue.h"

namespace tessera::comm {

// What of a sum a kernel does. On a real GPU all; kernels that run one after another, as on one emulated GPU, can't
// wait for each other: there all ranks send, then (of shares) all add, then all collect.
enum class PeerPart { kAll, kSend, kAdd, kCollect };

// out[i] = sum over ranks of in[i] in ascending order of ranks in FP32, rounded once, for i < count; `in` has a whole
// number of words, and peer_plan(way, ...).slots are at most view.capacity. Both begin at a multiple of 4 bytes; out
// may be in where the types agree. All calls of a view are made on one queue, on every rank in the same order and way.
void peer_sum_on_gpu(const device::PeerView& view, PeerWay way, const void* in, bool in_bf16, void* out, bool out_bf16,
                     int64_t count, const device::Queue& queue, PeerPart part = PeerPart::kAll);

}  // namespace tessera::comm
