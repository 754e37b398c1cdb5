// SPDX-License-Identifier: Apache-2.0
#pragma once
// The matrices of the experts that are here, as an op of experts wants them.
#include <deque>
#include <vector>

#include "bindings/c/boundary.h"

namespace tessera::bindings {

class PlacedExperts {
 public:
  PlacedExperts() = default;
  // w1, w3: [num_local] of [inner, hidden]; w2: [num_local] of [hidden, inner]. Packed as `op` wants it, for which
  // `desc` is that of its experts. Throws kInvalidArgument, naming the parameter.
  template <class Op>
  PlacedExperts(const tessera_context& context, const ops::Bound<Op>& op, const ops::MoeExperts::Desc& desc,
                const tessera_weight* w1, const tessera_weight* w3, const tessera_weight* w2)
      : w1_(place(context, op, desc, w1, desc.inner, desc.hidden, "weights.w1")),
        w3_(place(context, op, desc, w3, desc.inner, desc.hidden, "weights.w3")),
        w2_(place(context, op, desc, w2, desc.hidden, desc.inner, "weights.w2")) {}

  // By local expert.
  const ops::WeightView* w1() const { return w1_.as<ops::WeightView>(); }
  const ops::WeightView* w3() const { return w3_.as<ops::WeightView>(); }
  const ops::WeightView* w2() const { return w2_.as<ops::WeightView>(); }

 private:
  template <class Op>
  device::Buffer place(const tessera_context& context, const ops::Bound<Op>& op, const ops::MoeExperts::Desc& desc,
                       const tessera_weight* weights, int64_t rows, int64_t cols, const char* name) {
    check_not_null(weights, name);
    std::vector<ops::WeightView> views;
    for (int64_t e = 0; e < desc.num_local; ++e) {
      const ops::WeightView view = weight_of(weights + e, rows, cols, name);
      check_flag(view.format == desc.format, name, "one format for all experts", weights[e].format);
      packed_.push_back(packed_for(context, op, view));
      views.push_back(packed_.back().view);
    }
    device::Buffer placed(views.size() * sizeof(ops::WeightView), context.memory());
    context.memory().upload(placed.data(), views.data(), placed.size());
    return placed;
  }

  std::deque<ops::PackedWeight> packed_;  // first: the others are made of it
  device::Buffer w1_, w3_, w2_;           // ops::WeightView of each
};

}  // namespace tessera::bindings
