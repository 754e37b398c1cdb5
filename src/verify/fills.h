// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs that find broken kernels: heavy tails, zero and all-equal rows, one value per block, denormals, signed zeros,
// extreme block scales. Counter-based, so a seed printed on failure repeats them anywhere.
#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "device/buffer.h"
#include "ops/weight_view.h"

namespace tessera::verify {

// [rows, cols]: normal values; a few rows and columns 50 times larger; some rows zero, all equal, one non-zero per 16,
// or denormal; zeros of both signs.
std::vector<float> adversarial(Rng& rng, int64_t rows, int64_t cols);

// [rows, cols] of normal values, times `scale`.
std::vector<float> normal_values(Rng& rng, int64_t rows, int64_t cols, float scale = 1);

// The values as a tensor of that dtype (rounded for BF16).
device::Tensor as_tensor(const std::vector<float>& values, DType dtype, const Shape& shape);

// A random weight of that format: NVFP4 with all codes and block scales over the whole E4M3 range. Of large ones the
// values repeat after a prime number of them, which no row length divides.
struct RandomWeight {
  device::Buffer data, scales;
  ops::WeightView view;
  // Its values in double: code * block scale * tensor scale.
  std::vector<double> values() const;
};
RandomWeight random_weight(Rng& rng, ops::WeightFormat format, int64_t rows, int64_t cols);

}  // namespace tessera::verify
