// SPDX-License-Identifier: Apache-2.0
#pragma once
// What each op of a layer put out, for comparing two modes on the same input, and the first value that is not finite.
#include <optional>
#include <string>
#include <vector>

#include "model/trace.h"

namespace tessera::doctor {

class OpRecorder final : public model::Tracer {
 public:
  struct Output {
    std::string name;
    std::vector<float> values;
  };

  void tensor(std::string_view name, const TensorView& value) override;
  void clear();

  const std::vector<Output>& outputs() const { return outputs_; }
  // The routed experts' ids of the layer, token by token; empty where no router ran.
  const std::vector<int32_t>& expert_ids() const { return expert_ids_; }
  // "layers.3.attn.wq_a: nan at element 17 of [5, 128]", of the first such output since clear().
  const std::optional<std::string>& first_bad() const { return first_bad_; }

 private:
  std::vector<Output> outputs_;
  std::vector<int32_t> expert_ids_;
  std::optional<std::string> first_bad_;
};

struct OpError {
  std::string name;
  double relative = 0;  // |a - b| / |b| over the whole output
};

// Tokens that the two runs send to different sets of `per_token` experts.
int64_t num_rerouted(const OpRecorder& a, const OpRecorder& b, int64_t per_token);

// Outputs of the same name and size, in order of running, but for those that two modes hold in different forms.
std::vector<OpError> compare_outputs(const OpRecorder& mode, const OpRecorder& exact);

}  // namespace tessera::doctor
