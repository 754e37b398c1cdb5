// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds permuted weights of a layer by kinship (gram.h): who reads what the others read and write.
//   residual stream   read by wq_a, wkv, compressor, gate, w1, w3; written by wo_b; shared with embed and head
//   low-rank query    written by wq_a, read by wq_b
//   head values       written by wkv, read by wo_a
//   low-rank output   written by wo_a, read by wo_b, group by group
//   expert's inner    written by w1 and w3, read by w2; its values follow w3, its gates w1
#include <vector>

#include "doctor/gram.h"
#include "doctor/suspect.h"

namespace tessera::doctor {

// What the whole model shares: Gram matrices of embedding and head over a sample of the residual stream.
struct ResidualKin {
  std::vector<int64_t> indices;
  std::vector<Gram> grams;
};
ResidualKin residual_kin(model::WeightSource& weights);

struct KinshipReport {
  std::vector<Suspect> suspects;
  // Tests made, and those in which some order, stored or not, shows a kinship well above the noise: most of them in a
  // trained model, a few by chance in a random one.
  int64_t num_tests = 0, num_kin = 0;
};

// Tests layer `layer` (all its attention and expert matrices). Reads each matrix once.
KinshipReport test_kinship(model::WeightSource& weights, const ResidualKin& residual, int64_t layer);

}  // namespace tessera::doctor
