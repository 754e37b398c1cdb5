// SPDX-License-Identifier: Apache-2.0
#pragma once
// Linear maps of one input, in one call where their backend has one (decision 0023).
#include <span>
#include <string>
#include <vector>

#include "model/layers/linear_layer.h"

namespace tessera::model {

class LinearGroupLayer {
 public:
  struct Call {
    const LinearLayer* map;
    TensorView y;  // [rows, out]
  };

  LinearGroupLayer() = default;
  // `where` names the group in plans. Maps that one call can't compute together stay alone, and so does `norm`, which
  // may be null, where that isn't all of them.
  LinearGroupLayer(LayerBuilder& builder, const std::string& where, const std::vector<const LinearLayer*>& maps,
                   const NormLayer* norm = nullptr);

  // Whether the norm is a part of that call.
  bool has_norm() const { return !groups_.empty() && groups_.front().op.desc.norm.has_value(); }
  // Each y = map x, of the maps given to the constructor, in that order; where a norm was given each y = map norm(x),
  // and afterwards x is norm(x) or what it was; `norm` null: x is norm(x), which has_norm() excludes. A traced step
  // runs them one by one.
  void run(const StepContext& context, const TensorView& x, std::span<const Call> calls,
           const NormLayer* norm = nullptr) const;

 private:
  struct Group {
    ops::Bound<ops::LinearGroup> op;
    std::vector<size_t> members;
  };
  // All maps in one group if their weights have several formats and their backend has such a call. False: it has not.
  bool bind_all_formats(LayerBuilder& builder, const std::string& where, const std::vector<const LinearLayer*>& all);

  std::vector<Group> groups_;
  std::vector<size_t> alone_;
};

}  // namespace tessera::model
