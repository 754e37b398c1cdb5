// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rows of weights to NVFP4, measured as they are made. Bits are those of numeric::nvfp4_quantize_weight_row; the code
// here is arranged so that a compiler vectorises it, since a conversion should not take longer than reading its files.
#include <cstdint>

#include "convert/statistics.h"
#include "numeric/nvfp4.h"

namespace tessera::convert {

// Largest magnitude of `count` values; infinity where one of them is NaN or infinite.
float largest_magnitude(const float* x, int64_t count);

// `count` (a multiple of 16) finite values under the tensor scale `tensor_scale` > 0. codes: count / 2 bytes; scales:
// count / 16 bytes. Adds to the sums over values and blocks of `measured`.
void quantise_row(const float* x, int64_t count, float tensor_scale, numeric::Nvfp4WeightRule rule, uint8_t* codes,
                  uint8_t* scales, Statistics& measured);

// Measures a row that is NVFP4 already (codes and scales as they are, nothing lost), for `measured` as above.
// `measures_e8m0` false: the scales are powers of two, which UE8M0 has too.
void measure_row(const uint8_t* codes, const uint8_t* scales, int64_t count, float tensor_scale, bool measures_e8m0,
                 Statistics& measured);

}  // namespace tessera::convert
