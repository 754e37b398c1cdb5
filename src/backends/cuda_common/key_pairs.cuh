// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cached keys and values as the B operand of mma.sync (ptx/mma.cuh): pairs of BF16, exact for entries in BF16 and FP8.
#include <cstdint>

#include "backends/cuda_common/e4m3_pairs.cuh"
#include "backends/cuda_common/entries.cuh"

namespace tessera::backends::cuda_common {

// Channels of one entry as they lie in memory, 4 or 16, of one group of kKvGroup: loads first, arithmetic later.
// Entries begin at multiples of 8 bytes, and so do their parts.
template <int kChannels>
struct KeyPiece {
  uint32_t words[kChannels / 2];  // E4M3 codes use the first half

  __device__ void load_fp8(const uint8_t* at) { load_words<kChannels / 4>(at); }
  __device__ void load_bf16(const uint8_t* at) { load_words<kChannels / 2>(at); }

 private:
  template <int kCount>
  __device__ void load_words(const uint8_t* at) {
    if constexpr (kCount == 1) {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(at) + i);
        words[2 * i] = two.x, words[2 * i + 1] = two.y;
      }
    }
  }
};

// Scales of an entry's first `count` groups, up to 8: a UE8M0 code each.
struct KeyScales {
  uint2 codes;

  __device__ void load(const uint8_t* at) { codes = __ldg(reinterpret_cast<const uint2*>(at)); }
  __device__ uint32_t operator[](int group) const { return (group < 4 ? codes.x : codes.y) >> group % 4 * 8 & 0xFF; }
  // Whether all of them are from 2^-63 to 1: then the upper two bits of their codes are 01, values are BF16 numbers,
  // and so are probabilities times pair_scale's first, which is all of the scale.
  __device__ bool are_usual(int count) const {
    constexpr uint32_t kUsual = 0x40404040, kUpper = 0xC0C0C0C0;
    const auto upper_of = [](int codes_there) {
      return codes_there <= 0 ? 0 : codes_there >= 4 ? kUpper : kUpper >> 8 * (4 - codes_there);
    };
    return (((codes.x ^ kUsual) & upper_of(count)) | ((codes.y ^ kUsual) & upper_of(count - 4))) == 0;
  }
};

// Twice a number that brings E4M3's small pairs to their values: 2^(e - 7) as BF16, and what that can't hold.
struct PairScale {
  uint32_t first, second;
};
constexpr uint32_t kOnePair = 0x3F803F80, kNanPair = 0x7FC07FC0;
__device__ inline PairScale pair_scale(uint32_t low, uint32_t high) {
  const auto first = [](uint32_t e) { return e == 255 ? 0x7FC0u : (min(e, 134u) + 120) << 7; };
  const auto second = [](uint32_t e) { return (e == 255 ? 127 : max(e, 134u) - 134 + 127) << 7; };
  return {first(low) | first(high) << 16, second(low) | second(high) << 16};
}
// pair_scale's first of a pair of usual ones (KeyScales), each in a half of a word.
__device__ inline uint32_t usual_pair_scale(uint32_t pair) {
  return (pair + 120 * 0x10001) << 7;
}

// The pair of values whose codes `spread` holds (e4m3_pairs.cuh); is_usual: no NaN, and nothing that `first` can't
// hold.
__device__ inline uint32_t scaled_pair(uint32_t spread, bool is_usual, const PairScale& scale) {
  const uint32_t pair = ptx::multiply_bf16x2(e4m3_pair_small(spread), scale.first);
  return is_usual ? pair : with_e4m3_nan(ptx::multiply_bf16x2(pair, scale.second), spread);
}

// pairs[i] = channels 2 i and 2 i + 1 of those whose codes are in `words`.
template <int kWords>
__device__ void fp8_pairs(const uint32_t (&words)[kWords], uint32_t scale_code, uint32_t (&pairs)[2 * kWords]) {
  const PairScale scale = pair_scale(scale_code, scale_code);
  bool is_usual = scale.second == kOnePair;
#pragma unroll
  for (int i = 0; i < kWords; ++i) is_usual = is_usual && !has_e4m3_nan(words[i]);
  const auto fill = [&](bool usual) {
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
      pairs[i] = scaled_pair(__byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1000 : 0x3020), usual, scale);
    }
  };
  if (is_usual) [[likely]] {
    fill(true);
  } else {
    fill(false);
  }
}

// The same pairs times pair_scale's first alone, which lies in the lower half of `first`, in four instructions each: a
// code as a signed number of 16 bits, four places further, has E4M3's bits at the end of BF16's exponent and the sign
// where BF16 has it. A NaN's code is some number.
template <int kWords>
__device__ void usual_fp8_pairs(const uint32_t (&words)[kWords], uint32_t first, uint32_t (&pairs)[2 * kWords]) {
  const uint32_t scale = ptx::half_twice<false>(first);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    pairs[2 * i] = ptx::multiply_bf16x2((ptx::signed_halves<0>(words[i]) << 4) & 0x87F087F0, scale);
    pairs[2 * i + 1] = ptx::multiply_bf16x2((ptx::signed_halves<2>(words[i]) << 4) & 0x87F087F0, scale);
  }
}

// Channel kChannel of two keys in FP8, without the scales and times 2^-120, in three instructions; a NaN's code is some
// number: a key with a NaN has a NaN logit, so that all probabilities are.
template <int kChannel>
__device__ inline uint32_t fp8_key_pair(const KeyPiece<4>& low, const KeyPiece<4>& high) {
  return (ptx::signed_halves<kChannel>(low.words[0], high.words[0]) << 4) & 0x87F087F0;
}

// pairs[i] = channel i of two keys; of FP8 fp8_key_pair(), of which the probabilities take scales and 2^-120.
template <bool kIsFp8>
__device__ void key_pairs(const KeyPiece<4>& low, const KeyPiece<4>& high, uint32_t (&pairs)[4]) {
  if constexpr (kIsFp8) {
    pairs[0] = fp8_key_pair<0>(low, high), pairs[1] = fp8_key_pair<1>(low, high);
    pairs[2] = fp8_key_pair<2>(low, high), pairs[3] = fp8_key_pair<3>(low, high);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __byte_perm(low.words[i / 2], high.words[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
}
// The same with the scales: infinite where BF16 has no such number.
__device__ inline uint32_t scaled_key_pair(uint32_t pair, const PairScale& scale) {
  return ptx::multiply_bf16x2(ptx::multiply_bf16x2(pair, scale.first), scale.second);
}

}  // namespace tessera::backends::cuda_common
