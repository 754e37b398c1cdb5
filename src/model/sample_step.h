// SPDX-License-Identifier: Apache-2.0
#pragma once
// Draws tokens where the ops compute, from rows of logits that are left as they are.
#include "device/executor.h"
#include "model/layers/layer_builder.h"
#include "model/runner.h"

namespace tessera::model {

class SampleStep {
 public:
  SampleStep(LayerBuilder& builder, device::Executor& executor);

  // One token, at once. `logits` [vocab] is the request's row in the ops' memory; null: only the request has it, on the
  // host.
  int32_t run(const SampleRequest& request, const float* logits, void* workspace);

  // Queues draws that need nothing but `rows` and their masks; all addresses are of the ops' memory.
  void queue(float* logits, const ops::SampleRow* rows, const uint32_t* masks, int64_t num_rows, int32_t* tokens,
             void* workspace) const;

 private:
  template <class T>
  const T* place(device::Buffer& buffer, std::span<const T> values);

  ops::Bound<ops::Sample> op_;
  device::Executor& executor_;
  device::Buffer row_, how_, counts_, bias_ids_, bias_values_, mask_, token_;
};

}  // namespace tessera::model
