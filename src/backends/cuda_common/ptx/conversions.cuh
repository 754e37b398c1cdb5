// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions to E2M1 and E4M3 (sm_100a, sm_103a, sm_120a, sm_121a; E4M3: sm_89 on) and to BF16 (sm_80 on), and what
// goes with them. Source: PTX ISA, "cvt", "max", "rcp". On the emulated GPU they are what numeric/ says, which rounds
// as the instructions do.
#include <cstdint>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"

namespace tessera::backends::cuda_common::ptx {

// numeric::e2m1_from_float of eight values, the first in the lowest four bits.
__device__ inline uint32_t e2m1_codes(const float (&values)[8]) {
  uint32_t codes = 0;
#if defined(TESSERA_CUDA_EMULATED) || defined(TESSERA_SM100_EMULATED) || defined(TESSERA_SM120_EMULATED)
  for (int i = 0; i < 8; ++i) codes |= static_cast<uint32_t>(numeric::e2m1_from_float(values[i])) << 4 * i;
#else
  asm("{\n.reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\ncvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\ncvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n}"
      : "=r"(codes)
      : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "f"(values[4]), "f"(values[5]), "f"(values[6]),
        "f"(values[7]));
#endif
  return codes;
}

// numeric::e4m3_from_float.
__device__ inline uint8_t e4m3_code(float value) {
#ifdef TESSERA_CUDA_EMULATED
  return numeric::e4m3_from_float(value);
#else
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return static_cast<uint8_t>(pair);
#endif
}

// Two values as BF16, the first in the lower half; on a GPU a NaN is 0x7FFF.
__device__ inline uint32_t bf16_pair(float first, float second) {
#ifdef TESSERA_CUDA_EMULATED
  return numeric::bf16_from_float(first) | static_cast<uint32_t>(numeric::bf16_from_float(second)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

// The value, +0 instead of one below or -0; of a NaN some NaN.
__device__ inline float positive_part(float value) {
#ifdef TESSERA_CUDA_EMULATED
  return value <= 0 ? 0 : value;
#else
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// 1 / b within one in the last place; subnormal numbers are zero.
__device__ inline float reciprocal_estimate(float b) {
#ifdef TESSERA_CUDA_EMULATED
  return 1 / b;
#else
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(b));
  return estimate;
#endif
}

// a / b by IEEE's rules, without a branch: for b from 2^-22 to 2^120 and |a| up to 2^60, where the quotient is zero or
// no smaller than 2^-120. What nvcc makes of a division, less the way for numbers beyond.
__device__ inline float divide_usual(float a, float b) {
#ifdef TESSERA_CUDA_EMULATED
  return a / b;
#else
  const float estimate = reciprocal_estimate(b);
  const float inverse = __fmaf_rn(estimate, __fmaf_rn(-b, estimate, 1), estimate);
  const float quotient = __fmul_rn(a, inverse);
  const float nearest = __fmaf_rn(inverse, __fmaf_rn(-b, quotient, a), quotient);
  return __uint_as_float(__float_as_uint(nearest) | (__float_as_uint(a) & 0x80000000));  // a zero's sign is lost
#endif
}

// The larger of both halves as BF16; NaN where one is.
__device__ inline uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
#ifdef TESSERA_CUDA_EMULATED
  const auto larger = [](uint32_t first, uint32_t second) {
    const float x = numeric::bf16_to_float(static_cast<uint16_t>(first));
    const float y = numeric::bf16_to_float(static_cast<uint16_t>(second));
    return static_cast<uint32_t>(numeric::bf16_from_float(x != x || x > y ? x : y));
  };
  return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
#else
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
