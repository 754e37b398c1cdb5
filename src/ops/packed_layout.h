// SPDX-License-Identifier: Apache-2.0
#pragma once
// A permutation of a weight's bits that a kernel wants; FP8's scales may be kept in another form
// (WeightView::scales_fold). Packing never changes a value: unpack(pack(w)) == w, bit for bit, where both views say the
// same of scales.
#include <cstdint>

#include "device/queue.h"
#include "ops/weight_view.h"

namespace tessera::ops {

struct PackedLayout {
  const char* name;
  // Bytes of codes and of block scales once packed.
  int64_t (*data_bytes)(const WeightView& checkpoint);
  int64_t (*scale_bytes)(const WeightView& checkpoint);
  // `packed` has the shape and format of `checkpoint`, and buffers of the sizes above.
  void (*pack)(const WeightView& checkpoint, const WeightView& packed, device::Queue& queue);
  void (*unpack)(const WeightView& packed, const WeightView& checkpoint, device::Queue& queue);
  // pack() where both lie in a GPU's memory, queued there. Null: a layout of the CPU's.
  void (*pack_on_device)(const WeightView& checkpoint, const WeightView& packed, device::Queue& queue) = nullptr;
};

}  // namespace tessera::ops
