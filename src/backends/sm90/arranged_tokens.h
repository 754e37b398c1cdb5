// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inputs of linear maps by tiles of tokens, arranged for wgmma (arranged_inputs.cuh).
#include <cstdint>

#include "backends/sm90/arranged_inputs.cuh"
#include "device/queue.h"

namespace tessera::backends::sm90 {

struct ArrangedTokens {
  const uint16_t* x;  // [tokens, groups * in]
  char* arranged;     // [groups][tokens, in]
  int64_t in, groups, num_tokens;
  int32_t tile_tokens;

  static int64_t bytes(int64_t groups, int64_t num_tokens, int64_t in) {
    return ProductInputs::bytes(
        groups * ((num_tokens + ProductInputs::kRows - 1) / ProductInputs::kRows) * ProductInputs::kRows, in);
  }
  // Of the tile that begins with this token.
  __device__ int tokens_of(int64_t first_token) const {
    return static_cast<int>(min(num_tokens - first_token, int64_t{tile_tokens}));
  }
  __device__ char* tile(int64_t group, int64_t first_token) const {
    const int64_t padded = (num_tokens + ProductInputs::kRows - 1) / ProductInputs::kRows * ProductInputs::kRows;
    return arranged + ProductInputs::bytes(group * padded + first_token, in);
  }
};

void arrange_tokens(const ArrangedTokens& tokens, const device::Queue& queue);

}  // namespace tessera::backends::sm90
