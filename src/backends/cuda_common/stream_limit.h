// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many tokens weights stream for (weight_stream.cuh): a plain number, for launches and for predictions of their
// time.
#include <cstdint>

#include "base/integer_math.h"
#include "ops/weight_view.h"

namespace tessera::backends::cuda_common {

// Weights are read, and decoded, once for each 8 tokens. Beyond 8 that is worth it where the maps are so small that
// tiles of more tokens would leave most of the GPU idle: up to so many units of 16 rows by 512 columns by 8 tokens in
// all. Several maps are one launch then and not many: it is worth it for longer. FP8's units take twice as long. As
// measured on an H200.
constexpr int64_t kMostStreamedUnits = 6144, kMostStreamedUnitsOfMaps = 16384;

// `num_maps` of one input, with together `row_tiles` tiles of 16 rows by `width` columns.
inline bool streams_tokens(ops::WeightFormat format, int64_t num_maps, int64_t row_tiles, int64_t width,
                           int64_t num_tokens) {
  constexpr int64_t kTokens = 8, kColumns = 512;
  const int64_t token_tiles = ceil_div(num_tokens, kTokens);
  const int64_t most =
      (num_maps > 1 ? kMostStreamedUnitsOfMaps : kMostStreamedUnits) / (format == ops::WeightFormat::kFp8Block ? 2 : 1);
  return token_tiles == 1 || row_tiles * ceil_div(width, kColumns) * token_tiles <= most;
}

}  // namespace tessera::backends::cuda_common
