// SPDX-License-Identifier: Apache-2.0
#pragma once
// Does each expert belong to its row of the router, and is its gate the gate? An expert's gates open for the inputs
// that the router sends to it: the mean over w1's rows of their product with the router's row is positive, far above
// that of other experts' rows, and that of w3, whose sign means nothing, is not.
#include <vector>

#include "doctor/suspect.h"

namespace tessera::doctor {

struct RouterReport {
  std::vector<Suspect> suspects;
  double typical =
      0;  // mean over experts of their own row's measure, in deviations of the others'; trained: 3 and more
};

// Layer `layer`; layers that route by token id have nothing to compare. Reads gate, w1 and w3 of every expert.
RouterReport test_router(model::WeightSource& weights, int64_t layer);

}  // namespace tessera::doctor
