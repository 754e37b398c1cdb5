// SPDX-License-Identifier: Apache-2.0
#include "model/model_weights.h"

namespace tessera::model {

Matrix packed(Matrix matrix, const ops::PackedLayout& layout, device::Queue& queue) {
  Matrix out;
  out.view = matrix.view;
  out.data = device::Buffer(static_cast<size_t>(layout.data_bytes(matrix.view)));
  out.scales = device::Buffer(static_cast<size_t>(layout.scale_bytes(matrix.view)));
  out.view.data = out.data.data();
  out.view.block_scales = out.scales.data();
  layout.pack(matrix.view, out.view, queue);
  return out;
}

}  // namespace tessera::model
