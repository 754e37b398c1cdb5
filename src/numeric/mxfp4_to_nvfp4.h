// SPDX-License-Identifier: Apache-2.0
#pragma once
// MXFP4 (E2M1 codes, UE8M0 per 32) as NVFP4 (E2M1 codes, E4M3 per 16, FP32 for the tensor), exactly: codes are copied,
// a block's power of two becomes the E4M3 scale of both its halves times a global power of two.
//
//   1. Mxfp4Census over all blocks of every matrix that shares the global: w1 and w3 of an expert together, w2 alone.
//   2. m = mxfp4_global_exponent(census.max_scale()); the global, NVFP4's tensor scale, is 2^m.
//   3. mxfp4_to_nvfp4 with that m, on as many blocks at a time as memory allows: a block's result depends on it and m
//   only.
//
// E4M3 has the powers 2^-9 (subnormal) to 2^8, so with the largest block at 2^8 a block may be up to 2^17 smaller.
// Smaller ones are not representable; blocks of zeros always are. Source: NVIDIA Model Optimizer's cast of MXFP4 to
// NVFP4 (normal E4M3 powers only there); the formats: mxfp4.h, nvfp4.h.
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "numeric/mxfp4.h"
#include "numeric/nvfp4.h"

namespace tessera::numeric {

// Exponents of the powers of two that E4M3 has.
constexpr int kE4m3MinPower = -9, kE4m3MaxPower = 8;

// The E4M3 byte of 2^exponent, -9 <= exponent <= 8.
TESSERA_HOST_DEVICE constexpr uint8_t e4m3_power_of_two(int exponent) {
  return static_cast<uint8_t>(exponent >= -6 ? (exponent + 7) << 3 : 1 << (exponent - kE4m3MinPower));
}

// Whether the 32 values (16 bytes of codes) are all zero, of either sign.
TESSERA_HOST_DEVICE constexpr bool mxfp4_block_is_zero(const uint8_t* codes) {
  for (int i = 0; i < kMxfp4Block / 2; ++i) {
    if ((codes[i] & 0x77) != 0) return false;
  }
  return true;
}

// m of the global 2^m by the largest scale byte among blocks that are not zero; -1 (there is none) gives 0. The largest
// block gets E4M3's largest power, except that the global stays a normal FP32 number: nothing is lost by that, since
// UE8M0 ends at 2^-127.
TESSERA_HOST_DEVICE constexpr int mxfp4_global_exponent(int max_scale) {
  if (max_scale < 0) return 0;
  const int exponent = max_scale - 127 - kE4m3MaxPower;
  return exponent < -126 ? -126 : exponent;
}

// 2^m as FP32, -126 <= m <= 127.
TESSERA_HOST_DEVICE constexpr float mxfp4_global_scale(int global_exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(global_exponent + 127) << 23);
}

// Whether a block with this scale byte (not 0xFF) that isn't zero keeps its values exactly under the global 2^m.
TESSERA_HOST_DEVICE constexpr bool mxfp4_is_representable(uint8_t scale, int global_exponent) {
  const int power = scale - 127 - global_exponent;
  return kE4m3MinPower <= power && power <= kE4m3MaxPower;
}

// How many blocks there are of each scale. Censuses of parts add up to that of the whole.
struct Mxfp4Census {
  std::array<int64_t, 256> num_blocks{};  // by scale byte; without blocks of zeros, except under NaN (0xFF)
  int64_t num_zero_blocks = 0;

  constexpr void add(const uint8_t* codes, const uint8_t* scales, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      const bool is_zero = scales[b] != kE8m0Nan && mxfp4_block_is_zero(codes + b * (kMxfp4Block / 2));
      ++(is_zero ? num_zero_blocks : num_blocks[scales[b]]);
    }
  }
  constexpr void add(const Mxfp4Census& other) {
    for (size_t i = 0; i < num_blocks.size(); ++i) num_blocks[i] += other.num_blocks[i];
    num_zero_blocks += other.num_zero_blocks;
  }
  // Blocks whose scale is NaN: data that no format can carry.
  constexpr int64_t num_nan() const { return num_blocks[kE8m0Nan]; }
  // The largest scale byte of a block that isn't zero; -1 where there is none.
  constexpr int max_scale() const {
    int byte = kE8m0Nan - 1;
    while (byte >= 0 && num_blocks[static_cast<size_t>(byte)] == 0) --byte;
    return byte;
  }
  // Blocks that the global 2^m can't represent exactly.
  constexpr int64_t num_unrepresentable(int global_exponent) const {
    int64_t count = 0;
    for (size_t byte = 0; byte < kE8m0Nan; ++byte) {
      if (!mxfp4_is_representable(static_cast<uint8_t>(byte), global_exponent)) count += num_blocks[byte];
    }
    return count;
  }
};

// Converts `blocks` blocks: 16 bytes of codes and one scale byte each become 16 bytes of codes and two equal E4M3
// bytes. `out_codes` may be `codes`. A block of zeros gets scale byte 0 and keeps its codes (signs); a NaN scale gives
// NaN (0x7F). Returns the number of blocks that are not representable; those are rounded: below the window, scale 2^-9
// and codes E2M1(value / (2^-9 * 2^m)), nearest even, each value off by at most a quarter of 2^(m-9); above it (never
// with m from the census), scale 2^8 and codes saturating to 6.
TESSERA_HOST_DEVICE constexpr int64_t mxfp4_to_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t blocks,
                                                     int global_exponent, uint8_t* out_codes, uint8_t* out_scales) {
  int64_t num_rounded = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* from = codes + b * (kMxfp4Block / 2);
    uint8_t* to = out_codes + b * (kMxfp4Block / 2);
    uint8_t scale = 0;
    float factor = 1;  // of the codes' values, where they must be rounded
    if (scales[b] == kE8m0Nan) {
      scale = kE4m3Nan;
    } else if (!mxfp4_block_is_zero(from)) {
      const int power = scales[b] - 127 - global_exponent;
      const int kept = power < kE4m3MinPower ? kE4m3MinPower : power > kE4m3MaxPower ? kE4m3MaxPower : power;
      scale = e4m3_power_of_two(kept);
      if (power != kept) {
        ++num_rounded;
        // Eight powers of two already take every code to 0 or to 6.
        const int shift = power - kept < -8 ? -8 : power - kept > 8 ? 8 : power - kept;
        factor = mxfp4_global_scale(shift);
      }
    }
    for (int i = 0; i < kMxfp4Block / 2; ++i) {
      const uint8_t byte = from[i];
      to[i] = byte;
      if (factor != 1) {
        const uint8_t low = e2m1_from_float(e2m1_to_float(byte & 15) * factor);
        const uint8_t high = e2m1_from_float(e2m1_to_float(static_cast<uint8_t>(byte >> 4)) * factor);
        to[i] = static_cast<uint8_t>(low | high << 4);
      }
    }
    out_scales[2 * b] = scale;
    out_scales[2 * b + 1] = scale;
  }
  return num_rounded;
}

}  // namespace tessera::numeric
