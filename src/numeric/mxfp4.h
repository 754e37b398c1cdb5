// SPDX-License-Identifier: Apache-2.0
#pragma once
// Q4 and MXFP4: E2M1 codes, two per byte (even element low), with one power-of-two scale (UE8M0) per 32 of a row: the
// indexer's keys and queries, and the routed experts of official checkpoints.
// Source: DeepSeek-V4 inference/kernel.py, the FP4 activation quantiser; OCP Microscaling Formats specification 1.0.
#include <cstdint>

#include "base/host_device.h"
#include "numeric/e2m1.h"
#include "numeric/e8m0.h"
#include "numeric/nvfp4.h"

namespace tessera::numeric {

constexpr int kMxfp4Block = 32;

// The scale of a block of largest magnitude `amax`: 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); NaN (0xFF) where amax is
// NaN or infinite.
TESSERA_HOST_DEVICE constexpr uint8_t q4_scale(float amax) {
  constexpr float kFloor = 6 * 0x1p-126f;
  return detail::is_finite(amax) ? e8m0_from_float_up((amax > kFloor ? amax : kFloor) * (1.0f / 6.0f)) : kE8m0Nan;
}

// The code of a value under that scale, nearest even; 0 where it is NaN.
TESSERA_HOST_DEVICE constexpr uint8_t q4_code(float value, uint8_t scale) {
  return scale == kE8m0Nan ? uint8_t{0} : e2m1_from_float(value / e8m0_to_float(scale));
}

// `count` a multiple of 32. Per block of x its scale, and the codes.
TESSERA_HOST_DEVICE constexpr void q4_quantize(const float* x, int64_t count, uint8_t* codes, uint8_t* scales) {
  for (int64_t block = 0; block < count / kMxfp4Block; ++block) {
    const float* values = x + block * kMxfp4Block;
    scales[block] = q4_scale(abs_max(values, kMxfp4Block));
    for (int i = 0; i < kMxfp4Block; i += 2) {
      const uint8_t low = q4_code(values[i], scales[block]), high = q4_code(values[i + 1], scales[block]);
      codes[(block * kMxfp4Block + i) / 2] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

// code * scale: exact in FP32 and, inside the exponent range, in BF16.
TESSERA_HOST_DEVICE constexpr void q4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t count,
                                                 float* out) {
  for (int64_t block = 0; block < count / kMxfp4Block; ++block) {
    const float scale = e8m0_to_float(scales[block]);
    for (int64_t i = block * kMxfp4Block; i < (block + 1) * kMxfp4Block; i += 2) {
      out[i] = e2m1_to_float(codes[i / 2] & 15) * scale;
      out[i + 1] = e2m1_to_float(static_cast<uint8_t>(codes[i / 2] >> 4)) * scale;
    }
  }
}

}  // namespace tessera::numeric
