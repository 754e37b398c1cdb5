// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products of a run of the streams' columns with the rows of fn, and the sum of the run's squares, on tensor cores. An
// F32 value is the sum of three BF16 ones, its bits cut in three (exactly, but where the last are less than BF16 has,
// of values below 2^-110), so that products are those of the F32 values and only their sums round. Squares cost
// nothing: of the rows that products of matrices have eight are left over by fn, which are the streams of eight tokens
// themselves.
//
// The order of a sum, which no batch changes: a slice is some channels of all four streams, one stream's behind the
// other's; a run is 64 neighbouring columns of a slice, which a warp has, as two chunks. Of each part of fn a run's sum
// is one chain of four instructions of 16 columns (ChunkWords has which), and the parts are added, lowest bits first;
// of squares it is one chain. A slice's sum adds runs in turn, and who reads the sums adds slices (add_slices).
#include <cstdint>

#include "backends/cuda/mhc_slices.cuh"
#include "backends/cuda_common/ptx/mma.cuh"

namespace tessera::backends::cuda {

// Two neighbouring values as words of kParts BF16 parts each, whose sums they are; of an infinite value, NaN. (An
// infinite stream's product is NaN too where fn's lower parts are 0.)
template <int kParts>
__device__ void split_pair(float low, float high, uint32_t (&parts)[kParts]) {
  uint32_t bits[2] = {__float_as_uint(low), __float_as_uint(high)};
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    parts[p] = bits[0] >> 16 | (bits[1] & 0xFFFF0000u);
    if (p + 1 == kParts) break;
#pragma unroll
    for (uint32_t& b : bits) b = __float_as_uint(__uint_as_float(b) - __uint_as_float(b & 0xFFFF0000u));
  }
}

// Eight columns of a lane of a chunk, as four words of kParts parts: with q = lane % 4 those from 8 q on, which lie
// together. A chunk's first instruction has the first four of each lane's, its second the others.
template <int kParts>
struct ChunkWords {
  uint32_t words[4][kParts];

  __device__ void set(const float (&values)[8]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) split_pair<kParts>(values[2 * n], values[2 * n + 1], words[n]);
  }
};

// What a warp multiplies tokens' streams with: its run of all rows of fn, in registers. With H, M and L a part's three
// groups of eight rows, and S the tokens themselves, the instructions' matrices are H0 H1, H2 S, M0 M1, M2 L2, L0 L1.
// kIsEight: rows have a multiple of eight channels, so that a lane's columns are there or not together.
template <bool kIsEight>
class RunProducts {
 public:
  using P = MhcProducts;
  // Of two of eight tokens, of which a lane has those.
  struct Sums {
    float of_rows[P::kGroups][2], squares[2];
  };

  // num_sums: rows of fn, and one.
  __device__ RunProducts(const MhcJob& job, int slice, int num_sums) : num_sums_(num_sums) {
    const int channels = job.channels, hidden = static_cast<int>(job.hidden);
#pragma unroll
    for (int h = 0; h < P::kChunks; ++h) {
      const int column = first_column() + h * P::kChunk;
      const int stream = column / channels, channel = slice * channels + column % channels;
      const int count = min(hidden - channel, 8);
#pragma unroll
      for (int group = 0; group < P::kGroups; ++group) {
        const int row = group * P::kRows + lane() / 4;
        const float* fn = job.fn + (int64_t{row} * P::kS + stream) * hidden + channel;
        const bool is_row = row + 1 < num_sums;
        float values[8] = {};
        if constexpr (kIsEight) {
          if (is_row && count > 0) {
            const float4 first = reinterpret_cast<const float4*>(fn)[0], last = reinterpret_cast<const float4*>(fn)[1];
            values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
            values[4] = last.x, values[5] = last.y, values[6] = last.z, values[7] = last.w;
          }
        } else {
#pragma unroll
          for (int n = 0; n < 8; ++n) values[n] = is_row && n < count ? fn[n] : 0;
        }
        ChunkWords<kParts> chunk;
        chunk.set(values);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int matrix = group < 2 ? 2 * part : part == 0 ? 1 : 3;
            const int half = group < 2 ? group : part == 2 ? 1 : 0;
            fn_[matrix][2 * h + n / 2][half + n % 2 * 2] = chunk.words[n][part];
          }
        }
      }
    }
  }

  // Eight tokens' streams, s_streams' rows of row_values. Those that are not there are multiplied too, as what lies
  // there: each token's sums are its own.
  __device__ Sums multiply(const uint16_t* s_streams, int row_values) const {
    ChunkWords<1> streams[P::kChunks];
#pragma unroll
    for (int h = 0; h < P::kChunks; ++h) {
      const uint4 four = *reinterpret_cast<const uint4*>(s_streams + place(row_values, h));
      streams[h] = {{{four.x}, {four.y}, {four.z}, {four.w}}};
    }
    return multiply(streams);
  }
  __device__ Sums multiply(const float* s_streams, int row_values) const {
    ChunkWords<kParts> streams[P::kChunks];
#pragma unroll
    for (int h = 0; h < P::kChunks; ++h) {
      float values[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) values[n] = s_streams[place(row_values, h) + n];
      streams[h].set(values);
    }
    return multiply(streams);
  }

  // Of tokens [first, first + 8) of those that a block has: s_sums is [runs, tokens of the block, num_sums].
  __device__ void store(const Sums& sums, int first, int num_tokens, float* s_sums) const {
    const int row = lane() / 4, token = first + lane() % 4 * 2;
    float* s_token = s_sums + (static_cast<int>(threadIdx.x) / P::kWarp * num_tokens + token) * num_sums_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (token + i >= num_tokens) break;
#pragma unroll
      for (int group = 0; group < P::kGroups; ++group) {
        if (group * P::kRows + row + 1 < num_sums_) s_token[group * P::kRows + row] = sums.of_rows[group][i];
      }
      if (first + row == token + i) s_token[num_sums_ - 1] = sums.squares[i];
      s_token += num_sums_;
    }
  }

 private:
  static constexpr int kParts = 3, kMatrices = 5, kSteps = 2 * P::kChunks;

  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % P::kWarp;
  }
  __device__ static int first_column() {
    return static_cast<int>(threadIdx.x) / P::kWarp * P::kRun + lane() % 4 * 8;
  }
  __device__ static int place(int row_values, int h) {
    return lane() / 4 * row_values + first_column() + h * P::kChunk;
  }

  template <int kStreamParts>
  __device__ Sums multiply(const ChunkWords<kStreamParts> (&streams)[P::kChunks]) const {
    using cuda_common::ptx::mma_bf16;
    float sums[kMatrices][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto word = [&](int n, int part) { return streams[step / 2].words[step % 2 * 2 + n][part]; };
#pragma unroll
      for (int part = kStreamParts - 1; part >= 0; --part) {
        const uint32_t low = word(0, part), high = word(1, part);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          const auto& fn = fn_[m][step];
          const bool has_tokens = m == 1;
          mma_bf16(sums[m], fn[0], has_tokens ? word(0, 0) : fn[1], fn[2], has_tokens ? word(1, 0) : fn[3], low, high);
        }
#pragma unroll
        for (int p = 1; p < kStreamParts; ++p) mma_bf16(sums[1], 0, word(0, p), 0, word(1, p), low, high);
      }
    }
    Sums sum;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum.of_rows[0][i] = (sums[4][i] + sums[2][i]) + sums[0][i];
      sum.of_rows[1][i] = (sums[4][2 + i] + sums[2][2 + i]) + sums[0][2 + i];
      sum.of_rows[2][i] = (sums[3][2 + i] + sums[3][i]) + sums[1][i];
      sum.squares[i] = sums[1][2 + i];
    }
    return sum;
  }

  int num_sums_;
  uint32_t fn_[kMatrices][kSteps][4];
};

// Sums of a slice of tokens from `begin` on, `count` of the block's num_tokens times num_sums, of what the runs have
// given; kWide at once, which that is a multiple of.
template <int kWide>
__device__ void add_runs(const MhcJob& job, float* s_sums, int slice, int num_sums, int64_t begin, int count,
                         int num_tokens) {
  using cuda_common::Values;
  const int runs = static_cast<int>(blockDim.x) / MhcProducts::kWarp, of_run = num_tokens * num_sums;
  float* sums = job.sums + int64_t{slice} * job.slice_sums + begin * num_sums;
  for (int i = static_cast<int>(threadIdx.x) * kWide; i < count; i += static_cast<int>(blockDim.x) * kWide) {
    auto sum = cuda_common::load_pack<kWide>({s_sums, false}, i);
    constexpr int kAtOnce = 7;  // all but the first, where a slice has eight runs (4,096 channels)
    for (int first = 1; first < runs; first += kAtOnce) {
#pragma unroll
      for (int run = 0; run < kAtOnce; ++run) {
        if (first + run >= runs) break;
        const auto other = cuda_common::load_pack<kWide>({s_sums, false}, (first + run) * of_run + i);
#pragma unroll
        for (int n = 0; n < kWide; ++n) sum.v[n] += other.v[n];
      }
    }
    cuda_common::store_pack(Values{sums, false}, i, sum);
  }
}

}  // namespace tessera::backends::cuda
