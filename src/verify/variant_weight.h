// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight of the host as a variant wants it.
#include "ops/packed_weight.h"
#include "ops/variant.h"

namespace tessera::verify {

using VariantWeight = ops::PackedWeight;

// The layout that the variant asks for; null: as in the checkpoint.
template <class Op>
const ops::PackedLayout* layout_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc) {
  return variant.packed_layout == nullptr ? nullptr : variant.packed_layout(desc);
}

// Whether its scales fold is looked up anew.
template <class Op>
VariantWeight weight_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc, const ops::WeightView& view) {
  device::Queue queue;
  ops::WeightView checkpoint = view;
  checkpoint.scales_fold = ops::do_scales_fold(view);
  return ops::pack_weight(layout_for(variant, desc), checkpoint, queue);
}

}  // namespace tessera::verify
