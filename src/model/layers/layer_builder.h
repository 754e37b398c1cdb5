// SPDX-License-Identifier: Apache-2.0
#pragma once
// What layers are built from: the planner that binds their ops and the source of their weights.
#include <algorithm>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "model/cache_pool.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "ops/planner.h"

namespace tessera::model {

struct LayerBuilder {
  const Config& config;
  ops::Planner& planner;
  ModelWeights& weights;
  ops::Precision precision;
  int64_t max_tokens;                  // of a step
  int64_t window_slots;                // of a ring
  device::MemorySpace& memory;         // where the ops compute
  int64_t workspace_bytes = 0;         // out: the largest scratch that a bound op asked for
  int64_t arena_bytes = 0;             // out: activations of the layer that needs most
  comm::Communicator* comm = nullptr;  // of the ranks that share the model; null: there is one

  template <class Op>
  ops::Bound<Op> bind(const std::string& where, const typename Op::Desc& desc, int64_t max_rows) {
    ops::Bound<Op> bound = planner.bind<Op>(where, desc);
    workspace_bytes = std::max(workspace_bytes, bound.workspace_bytes(max_rows));
    return bound;
  }
  template <class Op>
  ops::Bound<Op> bind(const std::string& where, const typename Op::Desc& desc) {
    return bind<Op>(where, desc, max_tokens);
  }
  // Unbound where the parts run one by one (decision 0023). At most max_tokens rows.
  template <class Op>
  ops::Bound<Op> bind_fused(const std::string& where, const typename Op::Desc& desc,
                            const std::vector<ops::Chosen>& parts) {
    ops::Bound<Op> bound = planner.bind_fused<Op>(where, desc, parts);
    if (bound.is_bound()) workspace_bytes = std::max(workspace_bytes, bound.workspace_bytes(max_tokens));
    return bound;
  }
  DType activation() const { return precision.activation(); }
  // Values of the host where the ops find them.
  device::Tensor place(const std::vector<float>& values) const {
    const device::Tensor host(DType::kF32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), host.as<float>());
    return host.clone_into(memory);
  }
};

}  // namespace tessera::model
