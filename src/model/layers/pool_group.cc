// SPDX-License-Identifier: Apache-2.0
#include "model/layers/pool_group.h"

#include <vector>

#include "base/error.h"

namespace tessera::model {

PoolGroup::PoolGroup(LayerBuilder& builder, const std::string& where,
                     const std::vector<const CompressorLayer*>& compressors, const NormLayer* norm) {
  ops::PoolNorm::Desc desc;
  std::vector<ops::Chosen> parts;
  for (const CompressorLayer* compressor : compressors) {
    desc.pools.push_back(compressor->pool().desc);
    parts.push_back(compressor->pool().chosen());
  }
  if (norm != nullptr) {
    desc.norm = norm->op().desc;
    parts.push_back(norm->op().chosen());
  }
  if (parts.size() > 1) op_ = builder.bind_fused<ops::PoolNorm>(where, desc, parts);
}

bool PoolGroup::run(const StepContext& context, std::span<const Call> calls, const NormLayer& norm,
                    const TensorView& x) const {
  if (!op_.is_bound() || context.tracer != nullptr) {
    for (const Call& call : calls) call.compressor->pool().run(call.args, context.queue);
    return false;
  }
  TESSERA_CHECK(calls.size() == op_.desc.pools.size(), "the compressors of a layer");
  ops::PoolNorm::Args args;
  for (size_t i = 0; i < calls.size(); ++i) args.pools[i] = calls[i].args;
  const bool norms = op_.desc.norm.has_value();
  if (norms) args.norm = {.x = x, .weight = norm.weight(), .out = x, .num_rows = x.shape[0]};
  op_.run(args, context.queue);
  return norms;
}

}  // namespace tessera::model
