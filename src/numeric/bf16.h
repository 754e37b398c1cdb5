// SPDX-License-Identifier: Apache-2.0
#pragma once
// BF16: the upper half of an FP32. Rounding to nearest, ties to even; NaN stays NaN (quiet; on a GPU 0x7FFF, whatever
// its sign and payload), overflow gives infinity.
#include <cstdint>

#include "base/host_device.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

namespace tessera::numeric {

TESSERA_HOST_DEVICE constexpr float bf16_to_float(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

TESSERA_HOST_DEVICE constexpr uint16_t bf16_from_float(float value) {
#if defined(__CUDA_ARCH__) && !defined(TESSERA_CUDA_EMULATED)
  // One instruction instead of seven, which most kernels that only move values spent their time on. The same bits but
  // for a NaN, which is 0x7FFF.
  if (!__builtin_is_constant_evaluated()) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#endif
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  // A NaN whose payload lies in the lower half must not become infinity.
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
  return static_cast<uint16_t>((is_nan ? bits | 0x400000 : rounded) >> 16);
}

TESSERA_HOST_DEVICE constexpr float bf16_round(float value) {
  return bf16_to_float(bf16_from_float(value));
}

}  // namespace tessera::numeric
