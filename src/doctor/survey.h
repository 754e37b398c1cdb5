// SPDX-License-Identifier: Apache-2.0
#pragma once
// One pass over every weight: values that can't be read (NaN scales), matrices of zeros, scales that do not belong to
// their codes, and sizes out of line with those of sibling matrices.
#include <cstdint>
#include <string>
#include <vector>

#include "base/log.h"
#include "doctor/suspect.h"

namespace tessera::doctor {

struct MatrixFacts {
  std::string name;  // official
  ops::WeightFormat format = ops::WeightFormat::kF32;
  float tensor_scale = 1;
  double log2_rms = 0;  // of the values, tensor scale included; -1000 for zeros
  double off = 0;       // log2_rms less the siblings' median; 0 where there are none
  ScaleFit fit;
  model::StoredFormat stored = model::StoredFormat::kF32;  // on disk
};

struct Survey {
  std::vector<MatrixFacts> matrices;
  std::vector<Suspect> suspects;
  bool is_readable = true;  // false: a tensor could not be loaded, so the model can't run
};

// `progress` may be null; advances by matrices.
Survey survey_weights(model::WeightSource& weights, const std::vector<model::WeightRow>& rows, ProgressSink* progress);

}  // namespace tessera::doctor
