// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversion did to a family's values, in numbers that add up: over rows, matrices and shards.
#include <array>
#include <cstdint>

#include "convert/family.h"

namespace tessera::convert {

struct Statistics {
  // Matrices by what happened to them.
  int64_t num_rounded = 0;  // BF16, F32 or FP8, rounded to NVFP4
  int64_t num_exact = 0;    // MXFP4, its values kept exactly but for `num_inexact_blocks`
  int64_t num_nvfp4 = 0;    // NVFP4 already, its bits kept
  int64_t num_kept = 0;     // in another format, its bits kept
  // The rest is over the first three.
  int64_t num_values = 0, num_blocks = 0;  // blocks of 16
  int64_t num_saturated = 0;               // blocks whose largest value lay above 6 steps and was clipped to 6
  int64_t num_zero = 0;                    // blocks whose codes are all zero
  int64_t num_vanished = 0;                // of those, blocks that were not zero before
  int64_t num_inexact_blocks = 0;          // MXFP4 blocks of 32 outside the range of the tensor's scales
  // The loss is measured over what was rounded: matrices of other formats, and rows with inexact MXFP4 blocks. Exact
  // ones beside them would only make it look smaller.
  int64_t num_rounded_blocks = 0;
  double squared_value = 0;  // sum over the values before
  double squared_error = 0;  // sum over the differences (before - after)
  // Both over every fourth block of a row, had its scale been the power of two 2^ceil(log2(amax / 6)) instead of
  // an E4M3 number.
  double squared_value_e8m0 = 0, squared_error_e8m0 = 0;
  std::array<int64_t, 128> scales{};  // blocks by scale byte

  void add(const Statistics& other);
  // sqrt(squared error / squared value) of what was rounded; 0 where nothing was.
  double relative_error() const;
  double relative_error_e8m0() const;
};

using FamilyStatistics = std::array<Statistics, kNumFamilies>;

void add(FamilyStatistics& sum, const FamilyStatistics& other);

}  // namespace tessera::convert
