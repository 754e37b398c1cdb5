// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cached keys and values as the B operand of mma.sync (ptx/mma.cuh): pairs of BF16, exact for entries in BF16 and FP8.
#include <cstdint>

#include "backends/cuda_common/e4m3_pairs.cuh"
#include "backends/cuda_common/entries.cuh"

namespace tessera::backends::cuda_common {

// Channels of one entry as they lie in memory: loads first, arithmetic later. kChannels 8 or 16, all of one group of
// kKvGroup channels.
template <int kChannels>
struct KeyPiece {
  uint2 words[kChannels / 4];  // E4M3 codes use the first half
  uint32_t scale = 127;        // UE8M0

  // Entries begin at multiples of 8 bytes, and so do their parts.
  template <ops::EntryFormat kFormat>
  __device__ void load(const Entries& entries, const uint8_t* entry, int channel) {
    const uint8_t* at = entry + 2 * channel;
    if constexpr (kFormat == ops::EntryFormat::kKvFp8Bf16) {
      if (channel < entries.nope) {
#pragma unroll
        for (int i = 0; i < kChannels / 8; ++i) words[i] = __ldg(reinterpret_cast<const uint2*>(entry + channel) + i);
        scale = __ldg(entry + entries.at.scales + channel / ops::kKvGroup);
        return;
      }
      at = entry + entries.at.rope + 2 * (channel - entries.nope);
    }
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) words[i] = __ldg(reinterpret_cast<const uint2*>(at) + i);
  }

  __device__ uint32_t word(int i) const {
    return i % 2 == 0 ? words[i / 2].x : words[i / 2].y;
  }
};

// Twice a number that brings E4M3's small pairs to their values: 2^(e - 7) as BF16, and what that can't hold.
struct PairScale {
  uint32_t first, second;
};
__device__ inline PairScale pair_scale(uint32_t low, uint32_t high) {
  const auto first = [](uint32_t e) { return e == 255 ? 0x7FC0u : (min(e, 134u) + 120) << 7; };
  const auto second = [](uint32_t e) { return (e == 255 ? 127 : max(e, 134u) - 134 + 127) << 7; };
  return {first(low) | first(high) << 16, second(low) | second(high) << 16};
}

// The pair of values whose codes `spread` holds (e4m3_pairs.cuh).
__device__ inline uint32_t scaled_pair(uint32_t spread, bool may_be_nan, const PairScale& scale) {
  uint32_t pair = ptx::multiply_bf16x2(e4m3_pair_small(spread), scale.first);
  if (scale.second != 0x3F803F80) pair = ptx::multiply_bf16x2(pair, scale.second);
  return may_be_nan ? with_e4m3_nan(pair, spread) : pair;
}

// pairs[i] = channels 2 i and 2 i + 1 of a key.
__device__ inline void channel_pairs(const KeyPiece<16>& piece, bool is_fp8, uint32_t (&pairs)[8]) {
  if (!is_fp8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = piece.word(i);
    return;
  }
  const PairScale scale = pair_scale(piece.scale, piece.scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = piece.word(i / 2);
    pairs[i] = scaled_pair(__byte_perm(word, 0, i % 2 == 0 ? 0x1000 : 0x3020), has_e4m3_nan(word), scale);
  }
}

// pairs[i] = channel i of two keys.
__device__ inline void key_pairs(const KeyPiece<8>& low, const KeyPiece<8>& high, bool is_fp8, uint32_t (&pairs)[8]) {
  if (!is_fp8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pairs[i] = __byte_perm(low.word(i / 2), high.word(i / 2), i % 2 == 0 ? 0x5410 : 0x7632);
    }
    return;
  }
  const PairScale scale = pair_scale(low.scale, high.scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t a = low.word(i / 4), b = high.word(i / 4), at = i % 4;
    const uint32_t spread = __byte_perm(a, b, (4 + at) << 12 | at << 4);
    pairs[i] = scaled_pair(spread, has_e4m3_nan(a) || has_e4m3_nan(b), scale);
  }
}

}  // namespace tessera::backends::cuda_common
