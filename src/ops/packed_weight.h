// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight in the layout that a variant asks for.
#include "base/error.h"
#include "device/buffer.h"
#include "ops/packed_layout.h"

namespace tessera::ops {

struct PackedWeight {
  device::Buffer data, scales;  // empty where the layout is the checkpoint's: `view` is then the given one
  WeightView view;
};

// `layout` null: as in the checkpoint. `checkpoint` lies in `memory`, and so will what is packed; `queue` works there.
inline PackedWeight pack_weight(const PackedLayout* layout, const WeightView& checkpoint, device::Queue& queue,
                                device::MemorySpace& memory = device::host_memory()) {
  PackedWeight packed;
  packed.view = checkpoint;
  if (layout == nullptr) return packed;
  const auto pack = memory.is_host() ? layout->pack : layout->pack_on_device;
  TESSERA_CHECK(pack != nullptr, "a GPU's variant asks for a layout that is packed there");
  packed.data = device::Buffer(static_cast<size_t>(layout->data_bytes(checkpoint)), memory);
  packed.scales = device::Buffer(static_cast<size_t>(layout->scale_bytes(checkpoint)), memory);
  packed.view.data = packed.data.data();
  packed.view.block_scales = packed.scales.data();
  pack(checkpoint, packed.view, queue);
  return packed;
}

}  // namespace tessera::ops
