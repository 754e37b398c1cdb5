// SPDX-License-Identifier: Apache-2.0
#pragma once
// Linear maps of one input, for some tokens: more than stream, and so few rows that tiles over the whole width would
// leave multiprocessors idle. A tile is then a chunk of 512 columns (docs/contracts/numerics.md, section 4), chunk sums
// go to the workspace, and a second kernel adds them in ascending order: bit for bit what tiles over the whole width
// give.
#include <cstdint>
#include <span>

#include "device/queue.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm90 {

struct ChunkedMaps {
  std::span<const ops::Linear::Desc> maps;  // alike but for `out` and `output`, of one group
  TensorView x;                             // [tokens, in]
  const ops::WeightView* weights;           // of each map: [out, in], packed
  const TensorView* y;                      // of each map: [tokens, out]
  int64_t num_tokens;
  void* workspace;
  const ops::SwiGlu::Desc* swiglu = nullptr;  // of two maps, gate and up: y[0] becomes their activation
};

int64_t linear_chunks_workspace(std::span<const ops::Linear::Desc> maps, int64_t max_tokens);
// By tiles of so many tokens. For maps and numbers of tokens up to most_chunk_tokens() (sum_plans.h).
void linear_chunks(const ChunkedMaps& all, int32_t tile_tokens, device::Queue& queue);

}  // namespace tessera::backends::sm90
