// SPDX-License-Identifier: Apache-2.0
// index_scores by wgmma: a warpgroup has 64 keys as A, decoded into its registers, and multiplies them by the heads'
// queries, 64 columns of B, token after token. A thread block keeps the queries of its tokens and goes over keys; those
// that all its tokens share (a prompt's) are decoded once, and while a token's sums are weighed the next one's products
// run.
//   order  as in cuda.mma, whose bits these are: heads g and g + 8 of each 16 in turn, then over g by halves; a step of
//          16 channels is of 4 of each lane's 16 in a group of 64, pairs of FP4 codes (j, j + 4) of each eight
// What bounds it: many tokens by the products of BF16 (256 cycles for 64 keys of a token, of which a warp's scheduler
// issues some 170 times to weigh the sums); few by finding and decoding keys, some 310; what bounds one
// token is not known (docs/performance/hopper.md).
#include <algorithm>
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/e2m1_pairs.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/sm90/kernels.h"
#include "backends/sm90/uniform.cuh"
#include "numeric/bf16.h"

namespace tessera::backends::sm90 {

namespace {

using namespace cuda_common;

constexpr int kWarpgroup = 128, kLog2Keys = 6, kKeys = 1 << kLog2Keys, kHeads = 64, kWidth = 128;
constexpr int kGroup = 64, kGroups = kWidth / kGroup;  // channels of a row of 128 bytes in shared memory
constexpr int kPanelBytes = kHeads * kGroup * 2, kQueryBytes = kGroups * kPanelBytes;
constexpr int kCodeBytes = kWidth / 2;

// Tokens and warpgroups of a thread block, which has a multiprocessor for itself: three have registers for two tiles of
// sums, four get a token's first keys sooner.
constexpr int kManyTokens = 8, kManyWarpgroups = 3, kFewWarpgroups = 4;

struct Job {
  const uint16_t *queries, *weights;
  ops::PagedEntries<const uint8_t> keys;
  const int32_t* counts;
  float* scores;
  int64_t stride;
  int entry_bytes, num_tokens;
  float scale;
};

// What a lane loads of rows g and g + 8 of its warp's keys: 16 channels from 64 n + 16 t on and the row's scales.
struct Codes {
  uint32_t words[2][kGroups][2], scales[2];
};

// A: [step of 16 channels][as wgmma_bf16 takes it].
using Operand = uint32_t[kWidth / 16][4];

template <int kTokens>
struct Shared {
  float weights[kTokens][kHeads];
  int counts[kTokens];
  // How many keys this token and those behind it that have the same keys see; 0: the token before has the same keys.
  int limits[kTokens];
};

// What E2M1's pairs, times 2^-126, are multiplied by: 2^126 times the scale 2^(e - 127), as two factors of which the
// second is 1 up to a scale of 2.
__device__ inline uint2 factors_of(uint32_t e) {
  constexpr uint32_t kNan = 0x7FC0, kOne = 0x3F80, kMost = 128;
  const uint32_t first = e == 255 ? kNan : (min(e, kMost) + 126) << 7;
  const uint32_t second = kOne + ((max(e, kMost) - kMost) << 7);
  return {first | first << 16, second | second << 16};
}

__device__ inline void decode(const Codes& codes, int lane_of_row, Operand& a) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    uint2 factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = factors_of(codes.scales[r] >> (16 * n + lane_of_row / 2 * 8) & 0xFF);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = e2m1_pair_small(codes.words[i % 2][n][step / 2], step % 2 * 2 + i / 2);
        a[4 * n + step][i] = ptx::multiply_bf16x2(pair, factors[i % 2].x);
      }
    }
    constexpr uint32_t kOnes = 0x3F803F80;
    if (__any_sync(~0u, factors[0].y != kOnes || factors[1].y != kOnes)) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[4 * n + step][i] = ptx::multiply_bf16x2(a[4 * n + step][i], factors[i % 2].y);
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
    for (int t = 0; t < 4; ++t) v[t] = split_pairs(values_[t]);
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
__device__ inline float weigh(const float (&sums)[32], const float* s_weights, int lane_of_row) {
  float scores[2][2] = {};
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float2 weights = *reinterpret_cast<const float2*>(s_weights + 8 * j + 2 * lane_of_row);
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
  return lane_of_row == 0 ? low : high;
}

// A warpgroup's walk over its keys, every step-th 64, for the block's tokens.
template <int kTokens>
class Walk {
 public:
  __device__ Walk(const Job& job, const Shared<kTokens>& s, const char* s_queries, int first_token, int first, int step,
                  int most)
      : job_(job), s_(s), s_queries_(s_queries), first_token_(first_token), first_(first), step_(step), most_(most) {}

  // The codes of the first keys that have to be decoded.
  __device__ void begin() { load_next(0, first_); }

  // Of tokens that share their keys. Products under way cross no end of a loop (wide_sums.cuh).
  __device__ void run_shared() {
    static_assert(kTokens % 2 == 0);
    for (; first_ < most_; first_ += step_) {
      Operand a;
      float sums[2][kHeads / 2];
      decode(codes_, lane_of_row(), a);
      if (first_ + step_ < most_) load(0, first_ + step_);
      multiply(a, 0, sums[0]);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token + 1 < kTokens) {
          multiply(a, token + 1, sums[(token + 1) % 2]);
          ptx::wait_for_products<1>();
        } else {
          ptx::wait_for_products<0>();
        }
        finish(token, s_.counts[token], sums[token % 2]);
      }
    }
  }

  __device__ void run() {
    Operand a;
    for (; first_ < most_; first_ += step_) {
      for (int token = 0; token < kTokens; ++token) {
        if (uniform(s_.limits[token]) > first_) {
          decode(codes_, lane_of_row(), a);
          load_next(token + 1, first_);
        }
        const int count = uniform(s_.counts[token]);
        if (count <= first_) continue;
        float sums[kHeads / 2];
        multiply(a, token, sums);
        ptx::wait_for_products<0>();
        finish(token, count, sums);
      }
    }
  }

 private:
  __device__ static int lane_of_row() {
    return static_cast<int>(threadIdx.x) % 4;
  }
  // The first of a lane's two; the other is 8 further.
  __device__ static int row() {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return thread / 32 * 16 + thread % 32 / 4;
  }

  __device__ void multiply(const Operand& a, int token, float (&sums)[kHeads / 2]) const {
    const ptx::SharedOperand b = ptx::SharedOperand::of(s_queries_ + token * kQueryBytes, 1024);
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      ptx::wgmma_bf16<kHeads>(sums, a[k], b + (k / 4 * kPanelBytes + k % 4 * 32), k > 0);
    }
    ptx::commit_products();
  }
  __device__ void finish(int token, int count, const float (&sums)[kHeads / 2]) const {
    const float score = weigh(sums, s_.weights[token], lane_of_row());
    const int key = first_ + row() + 8 * lane_of_row();
    if (lane_of_row() < 2 && key < count) job_.scores[(first_token_ + token) * job_.stride + key] = score;
  }

  // Of the token's keys from first_key on; of the last one where there are no more.
  __device__ void load(int token, int first_key) {
    const auto keys = job_.keys.of_row(first_token_ + token);
    const int last = s_.limits[token] - 1 - first_key;
    // In a row, where they are: then a warp's lanes need one address.
    const bool are_in_row = keys.pages == nullptr || keys.shift >= kLog2Keys;
    const uint8_t* tile = are_in_row ? keys.at(first_key, job_.entry_bytes) : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = min(row() + 8 * r, last);
      const uint8_t* entry =
          are_in_row ? tile + in_tile * job_.entry_bytes : keys.at(first_key + in_tile, job_.entry_bytes);
      // Entries begin at 4 bytes.
      const uint32_t* words = reinterpret_cast<const uint32_t*>(entry) + 2 * lane_of_row();
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        codes_.words[r][n][0] = __ldg(words + n * kGroup / 8),
        codes_.words[r][n][1] = __ldg(words + n * kGroup / 8 + 1);
      }
      codes_.scales[r] = __ldg(reinterpret_cast<const uint32_t*>(entry + kCodeBytes));
    }
  }
  // Of the next token, from `token` on, whose keys from `first_key` on have to be decoded.
  __device__ void load_next(int token, int first_key) {
    for (; first_key < most_; first_key += step_, token = 0) {
      for (; token < kTokens; ++token) {
        if (s_.limits[token] > first_key) return load(token, first_key);
      }
    }
  }

  const Job& job_;
  const Shared<kTokens>& s_;
  const char* s_queries_;
  int first_token_, first_, step_, most_;
  Codes codes_;
};

// Grid: groups of kTokens tokens by groups of keys; a block takes every gridDim.y-th.
template <int kTokens, int kWarpgroups>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroup, 1) score_keys(const __grid_constant__ Job job) {
  char* s_queries = swizzled_shared<char>();
  __shared__ Shared<kTokens> s;
  wait_for_previous();
  const int first_token = static_cast<int>(blockIdx.x) * kTokens;
  const int num_tokens = min(kTokens, job.num_tokens - first_token);
  const int thread = static_cast<int>(threadIdx.x), threads = kWarpgroups * kWarpgroup;
  const int num_pieces = num_tokens * QueryPiece::kOfToken;
  const uint16_t* queries = job.queries + static_cast<int64_t>(first_token) * kHeads * kWidth;
  const QueryPiece piece(queries, min(thread, num_pieces - 1));  // on its way while the keys' places are found
  if (thread < kTokens) {
    const auto keys_of = [&](int j) { return job.keys.of_row(first_token + j); };
    const auto count_of = [&](int j) { return j < num_tokens ? job.counts[first_token + j] : 0; };
    s.counts[thread] = count_of(thread);
    int limit = 0;
    if (thread < num_tokens && (thread == 0 || !(keys_of(thread) == keys_of(thread - 1)))) {
      for (int j = thread; j < num_tokens && keys_of(j) == keys_of(thread); ++j) limit = max(limit, count_of(j));
    }
    s.limits[thread] = limit;
  }
  __syncthreads();
  int most = 0;
  bool are_shared = kTokens > 1;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    most = max(most, s.limits[j]);
    are_shared = are_shared && (j == 0 || s.limits[j] == 0);
  }
  if (static_cast<int>(blockIdx.y) * kWarpgroups * kKeys >= most) return;
  Walk<kTokens> walk(job, s, s_queries, first_token,
                     uniform((static_cast<int>(blockIdx.y) * kWarpgroups + thread / kWarpgroup) * kKeys),
                     uniform(static_cast<int>(gridDim.y) * kWarpgroups * kKeys), uniform(most));
  walk.begin();
  if (thread < num_pieces) piece.store(s_queries);
  for (int item = thread + threads; item < num_pieces; item += threads) QueryPiece(queries, item).store(s_queries);
  for (int i = thread; i < num_tokens * kHeads; i += threads) {
    const float weight = numeric::bf16_to_float(job.weights[static_cast<int64_t>(first_token) * kHeads + i]);
    s.weights[i / kHeads][i % kHeads] = numeric::bf16_round(weight * job.scale);
  }
  ptx::show_to_products();
  __syncthreads();
  if constexpr (kTokens > 1) {
    if (uniform(are_shared)) return walk.run_shared();
  }
  walk.run();
}

}  // namespace

bool index_scores_supports(const ops::IndexScores::Desc& desc, std::string& why_not) {
  if (desc.activation == DType::kBF16 && desc.keys.format == ops::EntryFormat::kIndexFp4 && desc.heads == kHeads &&
      desc.width == kWidth && desc.keys.entry_bytes() % 4 == 0) {
    return true;
  }
  why_not = "needs 64 heads of 128 channels, queries in BF16 and keys in FP4";
  return false;
}

void index_scores(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(kWidth) * static_cast<double>(kHeads)));
  const Job job{static_cast<const uint16_t*>(args.queries.data),
                static_cast<const uint16_t*>(args.weights.data),
                args.keys,
                args.counts,
                args.scores,
                args.stride,
                static_cast<int>(desc.keys.entry_bytes()),
                static_cast<int>(args.num_tokens),
                scale};
  const int64_t tiles = ceil_div<int64_t>(args.stride, kKeys), gpu = multiprocessors();
  // Tokens are taken together where many are of one sequence, and each multiprocessor has this many tiles at least.
  constexpr int64_t kEnoughTiles = 32, kRounds = 4;
  const bool is_many =
      args.num_tokens >= kManyTokens / 2 * args.num_slices && args.num_tokens * tiles >= kEnoughTiles * gpu;
  const int64_t tokens = is_many ? kManyTokens : 1, warpgroups = is_many ? kManyWarpgroups : kFewWarpgroups;
  const int64_t groups = ceil_div(args.num_tokens, tokens), most = ceil_div(tiles, warpgroups);
  if (groups == 0) return;
  // Blocks that are a whole number of rounds or little less.
  const int64_t blocks = (is_many ? kRounds : 1) * gpu;
  const dim3 grid(static_cast<unsigned>(groups),
                  static_cast<unsigned>(std::clamp(blocks / groups, std::min<int64_t>(1, most), most)));
  const auto start = [&](auto kernel) {
    launch("index_scores", queue, kernel, grid, static_cast<unsigned>(warpgroups * kWarpgroup),
           static_cast<size_t>(tokens * kQueryBytes), job);
  };
  is_many ? start(score_keys<kManyTokens, kManyWarpgroups>) : start(score_keys<1, kFewWarpgroups>);
}

}  // namespace tessera::backends::sm90
