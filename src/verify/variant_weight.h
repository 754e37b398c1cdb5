// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight of the host as a variant wants it: packed where it asks for that.
#include "device/buffer.h"
#include "ops/packed_layout.h"
#include "ops/variant.h"

namespace tessera::verify {

struct VariantWeight {
  device::Buffer data, scales;  // empty where the variant takes the checkpoint's bits
  ops::WeightView view;
};

// The layout that the variant asks for; null: as in the checkpoint.
template <class Op>
const ops::PackedLayout* layout_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc) {
  return variant.packed_layout == nullptr ? nullptr : variant.packed_layout(desc);
}

template <class Op>
VariantWeight weight_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc, const ops::WeightView& view) {
  VariantWeight weight;
  weight.view = view;
  const ops::PackedLayout* layout = layout_for(variant, desc);
  if (layout == nullptr) return weight;
  weight.data = device::Buffer(static_cast<size_t>(layout->data_bytes(view)));
  weight.scales = device::Buffer(static_cast<size_t>(layout->scale_bytes(view)));
  weight.view.data = weight.data.data();
  weight.view.block_scales = weight.scales.data();
  device::Queue queue;
  layout->pack(view, weight.view, queue);
  return weight;
}

}  // namespace tessera::verify
