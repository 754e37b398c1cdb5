// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where ranks hold columns of one matrix: what all_gather() gives lies rank behind rank, and becomes rows here; and the
// way back.
#include "device/queue.h"
#include "tensor/tensor_view.h"

namespace tessera::comm {

// out [rows, world * columns] = parts [world, rows, columns]: row r is row r of rank 0, then that of rank 1, ... Both
// F32, dense, in the memory of the queue's ops, disjoint. Bits are copied, those of a NaN too. On the queue's GPU,
// queued, or on the calling thread; nothing is allocated. Bound by reading and writing the matrix once.
// Errors: kInvalidArgument for types and shapes that don't fit.
void join_columns(const TensorView& parts, const TensorView& out, device::Queue& queue);

// The inverse: parts [world, rows, columns] = in [rows, world * columns]. Both F32, or both BF16 with an even number of
// columns; else as above.
void split_columns(const TensorView& in, const TensorView& parts, device::Queue& queue);

}  // namespace tessera::comm
