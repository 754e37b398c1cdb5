// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 activations from sums as tensor memory gives them: a thread has a row and some tokens, a block of 16 columns of
// the next map is one token and 16 rows. So the lanes of each half of a warp exchange a square of 16 rows by 16 tokens:
// four rounds in which lanes that differ in one bit swap half of what they have, two shuffles a token.
#include <cstdint>

#include "backends/sm100/input_tiles.cuh"
#include "numeric/nvfp4.h"

namespace tessera::backends::sm100 {

class TokenBlock {
 public:
  // By all lanes of a warp, each with values[j] of its row and token j; kCount up to 16.
  template <int kCount>
  __device__ explicit TokenBlock(const float (&values)[kCount]) {
    static_assert(kCount <= kSide);
#pragma unroll
    for (int j = 0; j < kSide; ++j) values_[j] = j < kCount ? values[j] : 0;
    exchange<8>(), exchange<4>(), exchange<2>(), exchange<1>();
  }
  // Whose 16 rows this lane has now.
  __device__ int token() const {
    return static_cast<int>(threadIdx.x) % kSide;
  }
  // Quantises them with scale g of the row.
  __device__ void store(const InputRow& to, int block, float g) const {
    alignas(8) uint8_t codes[kSide / 2];
    uint8_t scale;
    numeric::nvfp4_quantize_row(values_, kSide, g, codes, &scale);
    to.store(block, *reinterpret_cast<const uint64_t*>(codes), scale);
  }

 private:
  static constexpr int kSide = numeric::kNvfp4Block;

  // Afterwards bit kBit of a value's place and that of its lane have changed places.
  template <int kBit>
  __device__ void exchange() {
    const bool is_upper = (threadIdx.x & kBit) != 0;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if ((j & kBit) != 0) continue;
      float& kept_below = values_[j];
      float& kept_above = values_[j | kBit];
      const float other = __shfl_xor_sync(~0u, is_upper ? kept_below : kept_above, kBit);
      (is_upper ? kept_below : kept_above) = other;
    }
  }

  float values_[kSide];
};

}  // namespace tessera::backends::sm100
