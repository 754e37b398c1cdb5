// SPDX-License-Identifier: Apache-2.0
#pragma once
// Draws a token where the ops compute, from a row of logits that is left as it is.
#include "device/executor.h"
#include "model/layers/layer_builder.h"
#include "model/runner.h"

namespace tessera::model {

class SampleStep {
 public:
  SampleStep(LayerBuilder& builder, device::Executor& executor);

  // `logits` [vocab] is the request's row in the ops' memory; null: only the request has it, on the host.
  int32_t run(const SampleRequest& request, const float* logits, void* workspace);

 private:
  template <class T>
  const T* place(device::Buffer& buffer, std::span<const T> values);

  ops::Bound<ops::Sample> op_;
  device::Executor& executor_;
  device::Buffer row_, counts_, bias_ids_, bias_values_, token_;
};

}  // namespace tessera::model
