// SPDX-License-Identifier: Apache-2.0
// index_scores on tensor cores: a thread block has a token and goes over some of its keys, a warp 8 or 32 at a time.
// Query heads are the A operand, 16 at a time. Order of a score's sum: heads g and g + 8 of each 16 in turn, then over
// g by halves. What bounds it: with few tokens one pass over the heads; with many, by shared memory if only 8 keys took
// each load of the queries, else by instructions, of which decoding the keys is half.
#include <algorithm>
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/e2m1_pairs.cuh"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kWarps = 8, kBlock = 32 * kWarps, kTileKeys = 8, kHeadTile = 16;
constexpr int kManyTiles = 4;                                 // of keys that a warp has at a time where there are many
constexpr int kGroup = 64, kMaxWidth = 128, kMaxHeads = 128;  // a lane has 16 channels of each group

struct Job {
  const uint16_t *queries, *weights;
  ops::PagedEntries<const uint8_t> keys;
  const int32_t* counts;
  float* scores;
  int64_t entry_bytes, stride;
  int heads, width;
  float scale;
};

// Channels [16 t, 16 t + 16) of a group as pairs: of FP4 (j, j + 4) of each eight, else neighbours.
template <ops::EntryFormat kFormat>
__device__ void load_pairs(const uint8_t* entry, int width, int channel, uint32_t (&pairs)[8]) {
  if constexpr (kFormat == ops::EntryFormat::kIndexFp4) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(entry + channel / 2);  // entries begin at 4 bytes
    const uint32_t codes[2] = {__ldg(words), __ldg(words + 1)};
    const uint32_t e = __ldg(entry + width / 2 + channel / ops::kIndexGroup);
    const uint32_t scale = e == 255 ? 0x7FC0 : e == 0 ? 0x0040 : e << 7;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      constexpr uint32_t kUnscale = 0x7E807E80;  // 2^126, twice
      const uint32_t pair = ptx::multiply_bf16x2(e2m1_pair_small(codes[j / 4], j % 4), kUnscale);
      pairs[j] = ptx::multiply_bf16x2(pair, scale | scale << 16);
    }
  } else {
    const uint4* values = reinterpret_cast<const uint4*>(entry + 2 * channel);
    const uint4 low = __ldg(values), high = __ldg(values + 1);
    pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
    pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
  }
}

// Grid: tokens by groups of keys; a block takes every gridDim.y-th.
template <ops::EntryFormat kFormat, int kTiles>
__global__ void __launch_bounds__(kBlock, kTiles > 1 ? 2 : 1) score_keys(Job job) {
  constexpr int kBlockKeys = kWarps * kTiles * kTileKeys;
  uint4* s_queries =
      dynamic_shared<uint4>();  // [heads up to a multiple of 16][width / 8 + 1], the last of a row unused
  __shared__ float s_weights[kMaxHeads];
  wait_for_previous();
  const int64_t t = blockIdx.x;
  const int count = job.counts[t];
  if (static_cast<int>(blockIdx.y) * kBlockKeys >= count) return;
  const int words = job.width / 8, row_words = words + 1;
  const int num_tiles = (job.heads + kHeadTile - 1) / kHeadTile;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, lane_of_key = lane % 4;
  uint32_t pairs[kTiles][kMaxWidth / kGroup][8];
  const auto load_keys = [&](int first_key) {
    const auto keys = job.keys.of_row(t);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const uint8_t* entry = keys.at(min(first_key + k * kTileKeys + g, count - 1), job.entry_bytes);
#pragma unroll
      for (int n = 0; n < kMaxWidth / kGroup; ++n) {
        if (n * kGroup < job.width) load_pairs<kFormat>(entry, job.width, n * kGroup + 16 * lane_of_key, pairs[k][n]);
      }
    }
  };
  int first_key = static_cast<int>(blockIdx.y) * kBlockKeys + warp * kTiles * kTileKeys;
  load_keys(first_key);
  for (int i = static_cast<int>(threadIdx.x); i < num_tiles * kHeadTile * words; i += kBlock) {
    const int head = min(i / words, job.heads - 1);  // heads that aren't there count for nothing below
    uint4 v = __ldg(reinterpret_cast<const uint4*>(job.queries + (t * job.heads + head) * job.width) + i % words);
    if constexpr (kFormat == ops::EntryFormat::kIndexFp4) v = split_pairs(v);
    s_queries[i / words * row_words + i % words] = v;
  }
  if (threadIdx.x < job.heads) {
    const float weight = numeric::bf16_to_float(job.weights[t * job.heads + threadIdx.x]);
    s_weights[threadIdx.x] = numeric::bf16_round(weight * job.scale);
  }
  __syncthreads();
  while (true) {
    float scores[kTiles][2] = {};  // of keys 2 lane_of_key and its successor
    for (int tile = 0; tile < num_tiles; ++tile) {
      float sums[kTiles][4] = {};
      const uint4* low = s_queries + (tile * kHeadTile + g) * row_words + 2 * lane_of_key;
      const uint4* high = low + 8 * row_words;
#pragma unroll
      for (int n = 0; n < kMaxWidth / kGroup; ++n) {
        if (n * kGroup >= job.width) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 a = low[n * (kGroup / 8) + i], b = high[n * (kGroup / 8) + i];
#pragma unroll
          for (int k = 0; k < kTiles; ++k) {
            const uint32_t* key = &pairs[k][n][4 * i];
            ptx::mma_bf16(sums[k], a.x, b.x, a.y, b.y, key[0], key[1]);
            ptx::mma_bf16(sums[k], a.z, b.z, a.w, b.w, key[2], key[3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = tile * kHeadTile + g + i / 2 * 8;
        if (head >= job.heads) continue;
        const float weight = s_weights[head];
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
          scores[k][i % 2] += weight * (sums[k][i] < 0 ? 0.0f : sums[k][i]);  // a NaN passes through
        }
      }
    }
#pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
        scores[k][0] += __shfl_xor_sync(~0u, scores[k][0], step);
        scores[k][1] += __shfl_xor_sync(~0u, scores[k][1], step);
      }
    }
    if (g == 0) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + k * kTileKeys + 2 * lane_of_key + i;
          if (key < count) job.scores[t * job.stride + key] = scores[k][i];
        }
      }
    }
    first_key += static_cast<int>(gridDim.y) * kBlockKeys;
    if (first_key >= count) return;
    load_keys(first_key);
  }
}

}  // namespace

bool index_scores_mma_supports(const ops::IndexScores::Desc& desc, std::string& why_not) {
  const ops::EntryFormat format = desc.keys.format;
  if (desc.activation != DType::kBF16 || (format != ops::EntryFormat::kIndexFp4 && format != ops::EntryFormat::kBf16)) {
    why_not = "needs BF16 queries and keys in FP4 or BF16";
  } else if (desc.width % kGroup != 0 || desc.width > kMaxWidth || desc.heads > kMaxHeads ||
             desc.keys.entry_bytes() % 4 != 0) {
    why_not = "needs at most 128 heads of 128 channels, or of 64 in BF16";
  } else {
    return true;
  }
  return false;
}

void index_scores_mma(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue) {
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width) * static_cast<double>(desc.heads)));
  const Job job{static_cast<const uint16_t*>(args.queries.data),
                static_cast<const uint16_t*>(args.weights.data),
                args.keys,
                args.counts,
                args.scores,
                desc.keys.entry_bytes(),
                args.stride,
                static_cast<int>(desc.heads),
                static_cast<int>(desc.width),
                scale};
  const size_t shared_bytes = round_up<size_t>(static_cast<size_t>(desc.heads), kHeadTile) *
                              (static_cast<size_t>(desc.width) / 8 + 1) * sizeof(uint4);
  constexpr int64_t kFewKeys = kWarps * kTileKeys, kManyKeys = kFewKeys * kManyTiles;
  constexpr int64_t kBlocks = 8, kFull = 2;  // to a multiprocessor: blocks that are enough; that work at a time
  const int64_t few = ceil_div(args.stride, kFewKeys), many = ceil_div(args.stride, kManyKeys);
  const bool is_many = args.num_tokens * few > kManyTiles * kFull * multiprocessors();
  const int64_t groups =
      is_many ? std::clamp(ceil_div(kBlocks * multiprocessors(), args.num_tokens), int64_t{1}, many) : few;
  const auto start = [&](auto kernel) {
    launch("index_scores", queue, kernel, dim3(static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(groups)),
           kBlock, shared_bytes, job);
  };
  if (desc.keys.format == ops::EntryFormat::kBf16) {
    is_many ? start(score_keys<ops::EntryFormat::kBf16, kManyTiles>) : start(score_keys<ops::EntryFormat::kBf16, 1>);
  } else {
    is_many ? start(score_keys<ops::EntryFormat::kIndexFp4, kManyTiles>)
            : start(score_keys<ops::EntryFormat::kIndexFp4, 1>);
  }
}

}  // namespace tessera::backends::cuda
