// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight of the host in the layout that a variant asks for.
#include "device/buffer.h"
#include "ops/packed_layout.h"

namespace tessera::ops {

struct PackedWeight {
  device::Buffer data, scales;  // empty where the layout is the checkpoint's: `view` is then the given one
  WeightView view;
};

// `layout` null: as in the checkpoint. `queue` of the host.
inline PackedWeight pack_weight(const PackedLayout* layout, const WeightView& checkpoint, device::Queue& queue) {
  PackedWeight packed;
  packed.view = checkpoint;
  if (layout == nullptr) return packed;
  packed.data = device::Buffer(static_cast<size_t>(layout->data_bytes(checkpoint)));
  packed.scales = device::Buffer(static_cast<size_t>(layout->scale_bytes(checkpoint)));
  packed.view.data = packed.data.data();
  packed.view.block_scales = packed.scales.data();
  layout->pack(checkpoint, packed.view, queue);
  return packed;
}

}  // namespace tessera::ops
