// SPDX-License-Identifier: Apache-2.0
#pragma once
// How two blocks of a pair, which come to a product at different times, find out whether they have the same scales of
// B: each adds up a number for each row of B, and whoever comes second compares. Equal scales give equal numbers;
// scales that differ give other ones but for once in 2^31. Pure functions.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// Of the four scales of B's row `row`: the sum of these over all rows stands for all of them.
TESSERA_HOST_DEVICE constexpr uint32_t digest_of_scales(uint32_t row, uint32_t scales) {
  uint32_t bits = scales ^ (row + 1) * 0x9E3779B9u;
  bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;  // MurmurHash3's last steps, under which each bit changes half of all
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return bits ^ bits >> 16;
}

// What the block that came first has left.
struct PairDigest {
  static constexpr uint32_t kNone = 0;  // nobody has come yet
  uint32_t bits;

  TESSERA_HOST_DEVICE static constexpr uint32_t bits_of(uint32_t digest) { return digest | 1; }
  // `before`: what was there.
  TESSERA_HOST_DEVICE static constexpr bool agrees(uint32_t before, uint32_t digest) {
    return before == kNone || before == bits_of(digest);
  }
};

}  // namespace tessera::backends::cuda_common::ptx::emulated
