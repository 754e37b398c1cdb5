// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 activations from sums as tensor memory gives them: a thread has a row and some tokens, a block of 16 columns of
// the next map is one token and 16 rows. So the lanes of each half of a warp exchange a square of 16 rows by 16 tokens,
// as pairs of BF16: a round in which lanes swap halves of pairs, two pairs to a word, and three in which they swap half
// of their pairs: a shuffle a value.
#include <cstdint>

#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/quantized_block.cuh"
#include "backends/sm100/input_tiles.cuh"

namespace tessera::backends::sm100 {

class TokenBlock {
 public:
  static constexpr int kSide = numeric::kNvfp4Block, kPairs = kSide / 2;

  // By all lanes of a warp: pairs[j] has token j of the lane's row in the lower half, token j + 8 in the upper one.
  __device__ explicit TokenBlock(const uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) pairs_[j] = pairs[j];
    exchange_halves();
    exchange<4>(), exchange<2>(), exchange<1>();
  }
  // Whose 16 rows this lane has now.
  __device__ int token() const {
    return static_cast<int>(threadIdx.x) % kSide;
  }
  // Quantises them with scale g of the row.
  __device__ void store(const InputRow& to, int block, float g) const {
    uint32_t largest = 0;
    float values[kSide];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      largest = cuda_common::ptx::larger_bf16x2(largest, pairs_[j] & 0x7FFF7FFF);
      values[j] = __uint_as_float(pairs_[j] << 16);
      values[j + kPairs] = __uint_as_float(pairs_[j] & 0xFFFF0000);
    }
    largest = cuda_common::ptx::larger_bf16x2(largest, largest >> 16);
    const cuda_common::QuantizedBlock found = cuda_common::quantize_block(values, __uint_as_float(largest << 16), g);
    to.store(block, found.codes, found.scale);
  }

 private:
  // Afterwards bit 3 of the token and that of the lane have changed places: pairs are of neighbouring eights of rows.
  __device__ void exchange_halves() {
    const bool is_upper = (threadIdx.x & kPairs) != 0;
    // Bytes of (a pair, another): what the partner gets of both; then what of the pair is kept, with its part of that.
    const uint32_t given = is_upper ? 0x5410 : 0x7632;
    const uint32_t first = is_upper ? 0x3254 : 0x5410, second = is_upper ? 0x3276 : 0x7610;
#pragma unroll
    for (int j = 0; j < kPairs; j += 2) {
      const uint32_t taken = __shfl_xor_sync(~0u, __byte_perm(pairs_[j], pairs_[j + 1], given), kPairs);
      pairs_[j] = __byte_perm(pairs_[j], taken, first);
      pairs_[j + 1] = __byte_perm(pairs_[j + 1], taken, second);
    }
  }
  // Afterwards bit kBit of a pair's place and that of its lane have changed places.
  template <int kBit>
  __device__ void exchange() {
    const bool is_upper = (threadIdx.x & kBit) != 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if ((j & kBit) != 0) continue;
      uint32_t& kept_below = pairs_[j];
      uint32_t& kept_above = pairs_[j | kBit];
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? kept_below : kept_above, kBit);
      (is_upper ? kept_below : kept_above) = other;
    }
  }

  uint32_t pairs_[kPairs];
};

}  // namespace tessera::backends::sm100
