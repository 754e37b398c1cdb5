// SPDX-License-Identifier: Apache-2.0
#include "model/placed_weights.h"

#include "ops/packed_weight.h"

namespace tessera::model {

Matrix PlacedWeights::load_part(const std::string& name, const Shard& shard, const ops::PackedLayout* layout) {
  if (memory_.is_host()) return source_.load_part(name, shard, layout);
  // A CPU's layout, where its memory only pretends to be another, is packed before.
  const bool packs_here = layout != nullptr && layout->pack_on_device != nullptr;
  Matrix placed = source_.load_part(name, shard, packs_here ? nullptr : layout);
  if (&placed.data.memory() != &memory_) {
    placed.data = placed.data.clone_into(memory_);
    placed.scales = placed.scales.clone_into(memory_);
    placed.view.data = placed.data.data();
    placed.view.block_scales = placed.scales.data();
  }
  if (!packs_here) return placed;
  // What was copied is given back in the order of the queue: behind the packing.
  ops::PackedWeight packed = ops::pack_weight(layout, placed.view, queue_, memory_);
  return {std::move(packed.data), std::move(packed.scales), packed.view};
}

}  // namespace tessera::model
