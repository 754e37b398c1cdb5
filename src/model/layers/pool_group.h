// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a layer does between the maps of its input and those of the low-rank query: compressors pool their rows, the
// query is normed; in one call where their backend has one (decision 0023).
#include <span>
#include <string>
#include <vector>

#include "model/layers/compressor_layer.h"

namespace tessera::model {

class PoolGroup {
 public:
  struct Call {
    const CompressorLayer* compressor;
    ops::CompressorPool::Args args;
  };

  PoolGroup() = default;
  // `norm` null: somebody else norms.
  PoolGroup(LayerBuilder& builder, const std::string& where, const std::vector<const CompressorLayer*>& compressors,
            const NormLayer* norm);

  // The compressors given to the constructor, in that order. Whether `x` [rows, width] has been normed too, in place,
  // with `norm`: the one given to the constructor, or, where that was null, any, which is not looked at. A traced step
  // pools one by one and norms nothing.
  bool run(const StepContext& context, std::span<const Call> calls, const NormLayer& norm, const TensorView& x) const;

 private:
  ops::Bound<ops::PoolNorm> op_;
};

}  // namespace tessera::model
