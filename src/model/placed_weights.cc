// SPDX-License-Identifier: Apache-2.0
#include "model/placed_weights.h"

namespace tessera::model {

Matrix PlacedWeights::load_matrix(const std::string& name, const ops::PackedLayout* layout) {
  Matrix matrix = source_.load_matrix(name, layout);
  if (memory_.is_host()) return matrix;
  Matrix placed;
  placed.view = matrix.view;
  placed.data = matrix.data.clone_into(memory_);
  placed.scales = matrix.scales.clone_into(memory_);
  placed.view.data = placed.data.data();
  placed.view.block_scales = placed.scales.data();
  return placed;
}

}  // namespace tessera::model
