// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of index_scores by wgmma share: a warpgroup has 64 keys as A, decoded into its registers, and the
// heads' queries, 64 columns of B, lie in shared memory.
//   order  as in cuda.mma, whose bits these are: heads g and g + 8 of each 16 in turn, then over g by halves; a step of
//          16 channels is of 4 of each lane's 16 in a group of 64, pairs of FP4 codes (j, j + 4) of each eight
#include <cstdint>

#include "backends/cuda_common/e2m1_pairs.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "device/queue.h"
#include "numeric/bf16.h"
#include "ops/cache_entry.h"
#include "ops/paged_entries.h"

// What only these kernels know has a namespace of its own: attention has heads and groups too.
namespace tessera::backends::sm90::index {

namespace ptx = cuda_common::ptx;

constexpr int kWarpgroup = 128, kLog2Keys = 6, kKeys = 1 << kLog2Keys, kHeads = 64, kWidth = 128;
constexpr int kGroup = 64, kGroups = kWidth / kGroup;  // channels of a row of 128 bytes in shared memory
constexpr int kPanelBytes = kHeads * kGroup * 2, kQueryBytes = kGroups * kPanelBytes;
constexpr int kCodeBytes = kWidth / 2, kEntryBytes = kCodeBytes + kWidth / static_cast<int>(ops::kIndexGroup);

// Warpgroups of a thread block for one token: as many as have registers for one tile of sums, to get its first keys
// soon.
constexpr int kFewWarpgroups = 4;

struct Job {
  const uint16_t *queries, *weights;
  ops::PagedEntries<const uint8_t> keys;
  const int32_t* counts;
  float* scores;
  int64_t stride;
  int num_tokens;
  float scale;
};

// What a lane loads of rows g and g + 8 of its warp's keys: 16 channels from 64 n + 16 t on and the row's scales.
struct Codes {
  uint32_t words[2][kGroups][2], scales[2];
};

// A: [step of 16 channels][as wgmma_bf16 takes it].
using Operand = uint32_t[kWidth / 16][4];

// A lane's place in a row of four.
__device__ inline int lane_of_row() {
  return static_cast<int>(threadIdx.x) % 4;
}

// What E2M1's pairs, times 2^-126, are multiplied by: 2^126 times the scale 2^(e - 127), as two factors of which the
// second is 1 up to a scale of 2. As pairs.
__device__ inline uint2 factors_of(uint32_t e) {
  constexpr uint32_t kNan = 0x7FC0, kOne = 0x3F80, kMost = 128;
  const uint32_t first = e == 255 ? kNan : (min(e, kMost) + 126) << 7;
  const uint32_t second = kOne + ((max(e, kMost) - kMost) << 7);
  return {first | first << 16, second | second << 16};
}
// The first of them where no scale is above 2.
__device__ inline uint32_t small_factor_of(uint32_t e) {
  return e * 0x00800080 + 0x3F003F00;
}
// Whether one of four scales is above 2, or NaN: their bytes above 128.
__device__ inline bool has_large(uint32_t scales) {
  return ((scales & 0x7F7F7F7F) + 0x7F7F7F7F & scales & 0x80808080) != 0;
}

__device__ inline void decode(const Codes& codes, Operand& a) {
  const auto scale = [&](int n, int r) { return codes.scales[r] >> (16 * n + lane_of_row() / 2 * 8) & 0xFF; };
  const bool is_large = __any_sync(~0u, has_large(codes.scales[0]) || has_large(codes.scales[1])) != 0;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    uint32_t factors[2] = {small_factor_of(scale(n, 0)), small_factor_of(scale(n, 1))};
    if (is_large) factors[0] = factors_of(scale(n, 0)).x, factors[1] = factors_of(scale(n, 1)).x;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = cuda_common::e2m1_pair_small(codes.words[i % 2][n][step / 2], step % 2 * 2 + i / 2);
        a[4 * n + step][i] = ptx::multiply_bf16x2(pair, factors[i % 2]);
      }
    }
  }
  if (!is_large) return;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[4 * n + step][i] = ptx::multiply_bf16x2(a[4 * n + step][i], factors_of(scale(n, i % 2)).y);
      }
    }
  }
}

// The tokens' queries as B, piece by piece: panel n of a token has channels [64 n, 64 n + 64) of a head in a row, of
// which a piece has eight of each lane's 16.
class QueryPiece {
 public:
  static constexpr int kOfToken = kHeads * kGroups * 2;

  __device__ QueryPiece(const uint16_t* queries, int item) : row_(item / kEach), n_(item / 2 % kGroups), i_(item % 2) {
    const uint16_t* from = queries + static_cast<int64_t>(row_) * kWidth + n_ * kGroup;
#pragma unroll
    for (int t = 0; t < 4; ++t) values_[t] = __ldg(reinterpret_cast<const uint4*>(from) + 2 * t + i_);
  }
  __device__ void store(char* s_queries) const {
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) v[t] = cuda_common::split_pairs(values_[t]);
    const int head = row_ % kHeads;
    uint4* to = reinterpret_cast<uint4*>(s_queries + row_ / kHeads * kQueryBytes + n_ * kPanelBytes) + head * 8;
    const auto place = [&](int c) -> uint4& { return to[(4 * i_ + c) ^ (head % 8)]; };
    place(0) = {v[0].x, v[1].x, v[2].x, v[3].x};
    place(1) = {v[0].y, v[1].y, v[2].y, v[3].y};
    place(2) = {v[0].z, v[1].z, v[2].z, v[3].z};
    place(3) = {v[0].w, v[1].w, v[2].w, v[3].w};
  }

 private:
  static constexpr int kEach = 2 * kGroups;
  int row_, n_, i_;
  uint4 values_[4];
};

// The score of this lane's row g (lanes 0 of a row) or g + 8 (lanes 1). A NaN passes through.
__device__ inline float weigh(const float (&sums)[32], const float* s_weights) {
  float scores[2][2] = {};
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float2 weights = *reinterpret_cast<const float2*>(s_weights + 8 * j + 2 * lane_of_row());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i / 2][i % 2] += (i % 2 == 0 ? weights.x : weights.y) * ptx::positive_part(sums[4 * j + i]);
    }
  }
#pragma unroll
  for (int step = 2; step >= 1; step /= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i / 2][i % 2] += __shfl_xor_sync(~0u, scores[i / 2][i % 2], step);
  }
  const float low = scores[0][0] + scores[0][1], high = scores[1][0] + scores[1][1];
  return lane_of_row() == 0 ? low : high;
}

// Begins the products of 64 keys and a token's heads.
__device__ inline void multiply(const Operand& a, const char* s_token_queries, float (&sums)[kHeads / 2]) {
  const ptx::SharedOperand b = ptx::SharedOperand::of(s_token_queries, 1024);
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    ptx::wgmma_bf16<kHeads>(sums, a[k], b + (k / 4 * kPanelBytes + k % 4 * 32), k > 0);
  }
  ptx::commit_products();
}

// Writes the score of `key`, lane_of_row()'s of a lane's two, where the token sees it: `count` keys.
__device__ inline void finish(const Job& job, int token, int key, int count, const float* s_weights,
                              const float (&sums)[kHeads / 2]) {
  const float score = weigh(sums, s_weights);
  if (lane_of_row() < 2 && key < count) job.scores[token * job.stride + key] = score;
}

// What a head's scores of token `first_token` on are multiplied by, of `num_tokens`. By a thread block.
__device__ inline void load_weights(const Job& job, int first_token, int num_tokens, float* s_weights) {
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * kHeads; i += static_cast<int>(blockDim.x)) {
    const float weight = numeric::bf16_to_float(job.weights[static_cast<int64_t>(first_token) * kHeads + i]);
    s_weights[i] = numeric::bf16_round(weight * job.scale);
  }
}

// index_scores of one token to a row of the grid, whose keys lie in pages that hold whole tiles of 64 keys, are aligned
// to 16 bytes as keys in them are, and may be read to their end, whatever a token sees (index_scores_paged.cu).
void score_paged(const Job& job, dim3 grid, const device::Queue& queue);

}  // namespace tessera::backends::sm90::index
