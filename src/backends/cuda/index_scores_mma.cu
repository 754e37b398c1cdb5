// SPDX-License-Identifier: Apache-2.0
// index_scores on tensor cores: a thread block has a token and 64 of its keys, a warp 8 of them. Query heads are the A
// operand, 16 at a time. Order of a score's sum: heads g and g + 8 of each 16 in turn, then over g by halves.
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

constexpr int kWarps = 8, kBlock = 32 * kWarps, kWarpKeys = 8, kHeadTile = 16;
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

// Grid: tokens by groups of keys.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kBlock) score_keys(Job job) {
  uint4* s_queries =
      dynamic_shared<uint4>();  // [heads up to a multiple of 16][width / 8 + 1], the last of a row unused
  __shared__ float s_weights[kMaxHeads];
  wait_for_previous();
  const int64_t t = blockIdx.x, count = job.counts[t];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * (kWarps * kWarpKeys);
  if (first >= count) return;
  const int words = job.width / 8, row_words = words + 1;
  const int num_tiles = (job.heads + kHeadTile - 1) / kHeadTile;
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
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, lane_of_key = lane % 4;
  const int64_t first_key = first + warp * kWarpKeys;
  const uint8_t* entry = job.keys.of_row(t).at(min(first_key + g, count - 1), job.entry_bytes);
  uint32_t pairs[kMaxWidth / kGroup][8];
#pragma unroll
  for (int n = 0; n < kMaxWidth / kGroup; ++n) {
    if (n * kGroup < job.width) load_pairs<kFormat>(entry, job.width, n * kGroup + 16 * lane_of_key, pairs[n]);
  }
  __syncthreads();
  float scores[2] = {};  // of keys 2 lane_of_key and its successor
  for (int tile = 0; tile < num_tiles; ++tile) {
    float sums[4] = {};
    const uint4* low = s_queries + (tile * kHeadTile + g) * row_words + 2 * lane_of_key;
    const uint4* high = low + 8 * row_words;
#pragma unroll
    for (int n = 0; n < kMaxWidth / kGroup; ++n) {
      if (n * kGroup >= job.width) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 a = low[n * (kGroup / 8) + i], b = high[n * (kGroup / 8) + i];
        const uint32_t* k = &pairs[n][4 * i];
        ptx::mma_bf16(sums, a.x, b.x, a.y, b.y, k[0], k[1]);
        ptx::mma_bf16(sums, a.z, b.z, a.w, b.w, k[2], k[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = tile * kHeadTile + g + i / 2 * 8;
      if (head >= job.heads) continue;
      scores[i % 2] += s_weights[head] * (sums[i] < 0 ? 0.0f : sums[i]);  // a NaN passes through
    }
  }
#pragma unroll
  for (int step = 16; step >= 4; step /= 2) {
    scores[0] += __shfl_xor_sync(~0u, scores[0], step);
    scores[1] += __shfl_xor_sync(~0u, scores[1], step);
  }
  if (g != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t key = first_key + 2 * lane_of_key + i;
    if (key < count) job.scores[t * job.stride + key] = scores[i];
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
  const dim3 grid(static_cast<unsigned>(args.num_tokens),
                  static_cast<unsigned>(ceil_div<int64_t>(args.stride, kWarps * kWarpKeys)));
  const size_t shared_bytes = round_up<size_t>(static_cast<size_t>(desc.heads), kHeadTile) *
                              (static_cast<size_t>(desc.width) / 8 + 1) * sizeof(uint4);
  launch("index_scores", queue,
         desc.keys.format == ops::EntryFormat::kBf16 ? score_keys<ops::EntryFormat::kBf16>
                                                     : score_keys<ops::EntryFormat::kIndexFp4>,
         grid, kBlock, shared_bytes, job);
}

}  // namespace tessera::backends::cuda
