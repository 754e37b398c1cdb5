// SPDX-License-Identifier: Apache-2.0
#pragma once
// A linear map with its weight and scratch memory.
#include <string>

#include "bindings/c/boundary.h"

namespace tessera::bindings {

class BoundLinear {
 public:
  BoundLinear() = default;
  BoundLinear(const tessera_context& context, const ops::Linear::Desc& desc, const ops::WeightView& weight,
              int64_t max_tokens) {
    ops::Planner planner = context.planner();
    op_ = planner.bind<ops::Linear>("linear", desc);
    kernel_ = planner.lines().back().chosen;
    weight_ = packed_for(context, op_, weight);
    workspace_ = device::Buffer(static_cast<size_t>(op_.workspace_bytes(max_tokens)), context.memory());
  }

  // x [num_tokens, groups * in] -> y [num_tokens, groups * out].
  void run(const tessera_context& context, void* x, void* y, int64_t num_tokens) const {
    const ops::Linear::Desc& desc = op_.desc;
    op_.run({.x = {x, desc.activation, {num_tokens, desc.groups * desc.in}},
             .weight = weight_.view,
             .y = {y, desc.output, {num_tokens, desc.groups * desc.out}},
             .num_tokens = num_tokens,
             .workspace = workspace_.data()},
            context.queue());
  }
  const std::string& kernel() const { return kernel_; }

 private:
  ops::Bound<ops::Linear> op_;
  ops::PackedWeight weight_;
  device::Buffer workspace_;
  std::string kernel_;
};

}  // namespace tessera::bindings
