// SPDX-License-Identifier: Apache-2.0
#include "model/mxfp4_scaling.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "numeric/mxfp4_to_nvfp4.h"

namespace tessera::model {

namespace {

using checkpoint::LocatedTensor;
using numeric::Mxfp4Census;

constexpr int64_t kBlockCodeBytes = numeric::kMxfp4Block / 2;
constexpr int64_t kChunkBlocks = 1 << 16;  // 1 MiB of codes

int64_t num_blocks_of(const StoredTensor& matrix) {
  return static_cast<int64_t>(matrix.block_scales.entry->num_bytes);
}

// Calls use(scales, first, count) for consecutive runs of blocks.
template <class Use>
void for_scales(const StoredTensor& matrix, const Use& use) {
  const int64_t total = num_blocks_of(matrix);
  std::vector<uint8_t> scales(static_cast<size_t>(std::min(total, kChunkBlocks)));
  for (int64_t first = 0; first < total; first += kChunkBlocks) {
    const int64_t count = std::min(kChunkBlocks, total - first);
    matrix.block_scales.read_part(static_cast<uint64_t>(first), static_cast<uint64_t>(count), scales.data());
    use(scales.data(), first, count);
  }
}

void read_codes(const StoredTensor& matrix, int64_t first_block, int64_t count, uint8_t* out) {
  matrix.codes.read_part(static_cast<uint64_t>(first_block * kBlockCodeBytes),
                         static_cast<uint64_t>(count * kBlockCodeBytes), out);
}

// What the scales alone say: the range of exponents with blocks of zeros still counted in.
struct ScaleRange {
  int min = 255, max = -1;
  const StoredTensor* where = nullptr;  // of the first block that has `max`
  int64_t block = 0;
};

ScaleRange scale_range(std::span<const StoredTensor* const> matrices) {
  ScaleRange range;
  for (const StoredTensor* matrix : matrices) {
    for_scales(*matrix, [&](const uint8_t* scales, int64_t first, int64_t count) {
      for (int64_t b = 0; b < count; ++b) {
        const int scale = scales[b];
        if (scale == numeric::kE8m0Nan) {
          const LocatedTensor& tensor = matrix->block_scales;
          fail_data(tensor.file->path(), fmt::format("tensor {} at element {}", tensor.entry->name, first + b),
                    "an E8M0 scale", "NaN (byte 0xff)");
        }
        range.min = std::min(range.min, scale);
        if (scale > range.max) range.max = scale, range.where = matrix, range.block = first + b;
      }
    });
  }
  return range;
}

Mxfp4Census full_census(std::span<const StoredTensor* const> matrices) {
  Mxfp4Census census;
  std::vector<uint8_t> codes;
  for (const StoredTensor* matrix : matrices) {
    for_scales(*matrix, [&](const uint8_t* scales, int64_t first, int64_t count) {
      codes.resize(static_cast<size_t>(count * kBlockCodeBytes));
      read_codes(*matrix, first, count, codes.data());
      census.add(codes.data(), scales, count);
    });
  }
  return census;
}

}  // namespace

Mxfp4Scaling mxfp4_scaling(std::span<const StoredTensor* const> matrices) {
  Mxfp4Scaling scaling;
  for (const StoredTensor* matrix : matrices) scaling.num_blocks += num_blocks_of(*matrix);
  const ScaleRange range = scale_range(matrices);
  if (range.where == nullptr) return scaling;
  // The usual case: a block of the largest scale isn't zero, and all scales are in its window.
  std::array<uint8_t, kBlockCodeBytes> codes{};
  read_codes(*range.where, range.block, 1, codes.data());
  scaling.global_exponent = numeric::mxfp4_global_exponent(range.max);
  const bool is_wide = !numeric::mxfp4_is_representable(static_cast<uint8_t>(range.min), scaling.global_exponent);
  if (!is_wide && !numeric::mxfp4_block_is_zero(codes.data())) return scaling;
  const Mxfp4Census census = full_census(matrices);
  scaling.global_exponent = numeric::mxfp4_global_exponent(census.max_scale());
  scaling.num_unrepresentable = census.num_unrepresentable(scaling.global_exponent);
  return scaling;
}

}  // namespace tessera::model
