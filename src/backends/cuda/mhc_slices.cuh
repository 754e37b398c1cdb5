// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kernels of mhc_pre, mhc_head and mhc_post_pre are given, how they cut a token's streams into slices, and the
// sums that slices leave (mhc_products.cuh).
#include <cstdint>

#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/launch.cuh"
#include "base/error.h"
#include "base/integer_math.h"

namespace tessera::backends::cuda {

struct MhcJob {
  cuda_common::Values x;  // [tokens, 4, hidden]
  const int32_t* rows;    // which tokens; null: all
  const float *fn, *base, *scale;
  float* sums;            // [slices, rows, coefficients + 1], the workspace
  cuda_common::Values y;  // [rows, hidden]
  float *post, *comb;     // null: the head
  int64_t hidden;
  int channels, slices;  // of a slice, and how many there are (MhcProducts)
  int slice_sums;        // from one slice's sums to the next one's
  int iterations;
  float hc_eps, norm_eps;
  cuda_common::StreamWrite write;  // of mhc_post_pre, into x; out null: none
  cuda_common::Values weight;      // of its norm
  float eps;

  __device__ int64_t token(int64_t row) const { return rows == nullptr ? row : rows[row]; }
};

struct MhcProducts {
  static constexpr int kS = ops::kHcStreams, kWarp = 32;
  // Slices at most, of up to 8,192 channels of a stream (of more, multiples of that); channels of a slice are a
  // multiple of 16, so that its columns are whole runs.
  static constexpr int kSlices = 32, kChannelStep = 16, kMostChannels = 256;
  static constexpr int kRun = 64, kChunk = 32, kChunks = kRun / kChunk;
  static constexpr int kMostThreads = kS * kMostChannels / kRun * kWarp;
  // Rows that a product has at once: three groups of eight of fn, and one of tokens.
  static constexpr int kRows = 8, kGroups = ops::kHcCoefficients / kRows, kTokens = 8;
  // Rows of shared memory lie so far apart that the eight that a load has are in different banks (of BF16).
  static constexpr int kRowPadding = 32;
  // From so many on, blocks go through several groups of tokens, copies of further ones under way.
  static constexpr int kMany = 65, kManyTokens = 16, kMostStages = 3;
  static_assert(kGroups * kRows == ops::kHcCoefficients && kGroups == 3);

  static int channels(int64_t hidden) {
    const int64_t most_slices = kSlices * ceil_div<int64_t>(hidden, int64_t{kSlices} * kMostChannels);
    return static_cast<int>(round_up<int64_t>(ceil_div(hidden, most_slices), kChannelStep));
  }
  // Sums of a slice: of rows to the next multiple of four, so that each begins where four can be stored at once.
  static int64_t slice_sums(int64_t num_rows, int num_sums) { return round_up<int64_t>(num_rows, 4) * num_sums; }
  static int slices(int64_t hidden) { return static_cast<int>(ceil_div<int64_t>(hidden, channels(hidden))); }
  // Threads of a block: a warp for each run.
  TESSERA_HOST_DEVICE static int threads(int channels) { return kS * channels / kRun * kWarp; }
  TESSERA_HOST_DEVICE static int row_values(int channels) { return kS * channels + kRowPadding; }
};

inline void cut_in_slices(MhcJob& job, int64_t hidden, int num_sums, int64_t num_rows) {
  using P = MhcProducts;
  const int64_t sums = P::slice_sums(num_rows, num_sums);
  TESSERA_CHECK(sums * P::slices(hidden) <= INT32_MAX, "sums that 32 bits count");
  job.hidden = hidden, job.channels = P::channels(hidden), job.slices = P::slices(hidden);
  job.slice_sums = static_cast<int>(sums);
}

// A row's sums, from those of its slices, into s_sums: four chains of every fourth, added in pairs, a lane each. By
// `threads` of the block, whole warps, of which this is number `thread`.
__device__ inline void add_slices(const MhcJob& job, int num_sums, int64_t row, int thread, int threads,
                                  float* s_sums) {
  constexpr int kChains = 4, kAtOnce = MhcProducts::kSlices / kChains;
  const int slices = job.slices, chain = thread % kChains, apart = job.slice_sums;
#pragma unroll 1
  for (int at = thread / kChains; at < round_up(num_sums, MhcProducts::kWarp / kChains); at += threads / kChains) {
    // What can be indexed by 32 bits is: addresses are worked out when all else waits for them.
    int i = static_cast<int>(row) * num_sums + min(at, num_sums - 1) + chain * apart;
    float sum = 0;
#pragma unroll 1
    for (int first = chain; first < slices; first += MhcProducts::kSlices) {
      float values[kAtOnce];  // all on their way together
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        values[n] = first + n * kChains < slices ? job.sums[i + n * kChains * apart] : 0.0f;
      }
#pragma unroll
      for (const float value : values) sum += value;
      i += MhcProducts::kSlices * apart;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (chain == 0 && at < num_sums) s_sums[at] = sum;
  }
}

}  // namespace tessera::backends::cuda
