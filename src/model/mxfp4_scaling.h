// SPDX-License-Identifier: Apache-2.0
#pragma once
// The global power of two under which MXFP4 matrices of a checkpoint become NVFP4, found with bounded memory.
#include <cstdint>
#include <span>

#include "model/weight_format.h"

namespace tessera::model {

struct Mxfp4Scaling {
  int global_exponent = 0;          // numeric::mxfp4_global_exponent
  int64_t num_blocks = 0;           // of all matrices
  int64_t num_unrepresentable = 0;  // blocks that NVFP4 can't hold exactly under this global
};

// Of matrices (each StoredFormat::kMxfp4) that share one global: w1 and w3 of an expert, or one alone. Depends on whole
// tensors, never on a rank's slice, so that every rank finds the same. Reads all block scales, and codes only as far as
// they decide something. Throws kDataLoss for a NaN scale, naming tensor and element.
Mxfp4Scaling mxfp4_scaling(std::span<const StoredTensor* const> matrices);

}  // namespace tessera::model
