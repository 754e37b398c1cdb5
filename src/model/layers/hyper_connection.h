// SPDX-License-Identifier: Apache-2.0
#pragma once
// The hyper-connection around one sublayer: reads its input out of the four streams and writes its output back.
#include "model/layers/layer_builder.h"
#include "model/layers/step_context.h"

namespace tessera::model {

ops::MhcDesc mhc_desc(const LayerBuilder& builder);

// The three parameter tensors of a site, FP32.
struct MixerWeights {
  MixerWeights() = default;
  MixerWeights(LayerBuilder& builder, const std::string& prefix);
  device::Tensor fn, base, scale;
};

class HyperConnection {
 public:
  // What read() leaves for write().
  struct Coefficients {
    float *post, *comb;  // [tokens, 4], [tokens, 4, 4]
  };

  HyperConnection() = default;
  // `prefix`: "layers.3.hc_attn".
  HyperConnection(LayerBuilder& builder, const std::string& prefix);

  TensorView read(const StepContext& context, const TensorView& streams, Coefficients& coefficients) const;
  // streams <- post * output + C^T streams, in place.
  void write(const StepContext& context, const TensorView& streams, const TensorView& output,
             const Coefficients& coefficients) const;

 private:
  std::string prefix_;
  ops::Bound<ops::MhcPre> pre_;
  ops::Bound<ops::MhcPost> post_;
  MixerWeights weights_;
};

}  // namespace tessera::model
