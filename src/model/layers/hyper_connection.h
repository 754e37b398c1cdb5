// SPDX-License-Identifier: Apache-2.0
#pragma once
// The hyper-connection around one sublayer: reads its input, normalised, out of the four streams and writes its output
// back.
#include "model/layers/linear_layer.h"

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
  // What a read leaves for write(), of the streams' tokens: all of the step, or this rank's run.
  struct Coefficients {
    float *post = nullptr, *comb = nullptr;  // [tokens, 4], [tokens, 4, 4]
  };
  struct Read {
    TensorView y;  // [stream_rows(), hidden], normalised
    Coefficients coefficients;
  };

  HyperConnection() = default;
  // `prefix`: "layers.3.hc_attn"; `norm`: "layers.3.attn_norm", of what is read.
  HyperConnection(LayerBuilder& builder, const std::string& prefix, const std::string& norm);

  Read read(const StepContext& context, const TensorView& streams) const;
  // out <- post * output + C^T streams; `out` may be `streams`.
  void write(const StepContext& context, const TensorView& streams, const TensorView& output,
             const Coefficients& coefficients, const TensorView& out) const;

  // From the arena.
  Read take_read(const StepContext& context) const;
  // The same as parts of fused calls.
  ops::MhcPre::Args read_args(const StepContext& context, const TensorView& streams, const Read& read) const;
  static ops::MhcPost::Args write_args(const TensorView& streams, const TensorView& output,
                                       const Coefficients& coefficients, const TensorView& out);
  const ops::Bound<ops::MhcPre>& pre() const { return pre_; }
  const ops::Bound<ops::MhcPost>& post() const { return post_; }
  const NormLayer& norm() const { return norm_; }

 private:
  std::string prefix_;
  ops::Bound<ops::MhcPre> pre_;
  ops::Bound<ops::MhcPost> post_;
  MixerWeights weights_;
  NormLayer norm_;
  ops::Bound<ops::MhcPostPre> read_;  // pre and norm
};

}  // namespace tessera::model
