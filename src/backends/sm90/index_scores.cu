// SPDX-License-Identifier: Apache-2.0
// index_scores by wgmma: a warpgroup has 64 keys as A, decoded into its registers, and multiplies them by the heads'
// queries, 64 columns of B, token after token. A thread block keeps the queries of its tokens and goes over keys; those
// that all its tokens share (a prompt's) are decoded once, and while a token's sums are weighed the next one's products
// run.
// What bounds it: many tokens by the products of BF16 (256 cycles for 64 keys of a token, of which a warp's scheduler
// issues some 170 times to weigh the sums) and what runs beside them (docs/performance/hopper.md). Few tokens come here
// only where their keys lie in arrays or in small pages; else see index_scores_paged.cu.
#include <algorithm>
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/sm90/index_products.cuh"
#include "backends/sm90/kernels.h"
#include "backends/sm90/uniform.cuh"

namespace tessera::backends::sm90 {

namespace {

using namespace index;

// Tokens and warpgroups of a thread block, which has a multiprocessor for itself: three have registers for two tiles of
// sums.
constexpr int kManyTokens = 8, kManyWarpgroups = 3;

template <int kTokens>
struct Shared {
  float weights[kTokens][kHeads];
  int counts[kTokens];
  // How many keys this token and those behind it that have the same keys see; 0: the token before has the same keys.
  int limits[kTokens];
};

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
      decode(codes_, a);
      if (first_ + step_ < most_) load(0, first_ + step_);
      multiply(a, queries_of(0), sums[0]);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token + 1 < kTokens) {
          multiply(a, queries_of(token + 1), sums[(token + 1) % 2]);
          ptx::wait_for_products<1>();
        } else {
          ptx::wait_for_products<0>();
        }
        finish_token(token, s_.counts[token], sums[token % 2]);
      }
    }
  }

  __device__ void run() {
    Operand a;
    for (; first_ < most_; first_ += step_) {
      for (int token = 0; token < kTokens; ++token) {
        if (uniform(s_.limits[token]) > first_) {
          decode(codes_, a);
          load_next(token + 1, first_);
        }
        const int count = uniform(s_.counts[token]);
        if (count <= first_) continue;
        float sums[kHeads / 2];
        multiply(a, queries_of(token), sums);
        ptx::wait_for_products<0>();
        finish_token(token, count, sums);
      }
    }
  }

 private:
  // Row g (0) or g + 8 (1) of this lane's 16 of the warpgroup's 64: keys as they lie.
  __device__ static int key_of(int r) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }
  __device__ const char* queries_of(int token) const {
    return s_queries_ + token * kQueryBytes;
  }
  __device__ void finish_token(int token, int count, const float (&sums)[kHeads / 2]) const {
    finish(job_, first_token_ + token, first_ + key_of(lane_of_row()), count, s_.weights[token], sums);
  }

  // Of the token's keys from first_key on; of the last one where there are no more.
  __device__ void load(int token, int first_key) {
    const auto keys = job_.keys.of_row(first_token_ + token);
    const int last = s_.limits[token] - 1 - first_key;
    // In a row, where they are: then a warp's lanes need one address.
    const bool are_in_row = keys.pages == nullptr || keys.shift >= kLog2Keys;
    const uint8_t* tile = are_in_row ? keys.at(first_key, kEntryBytes) : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = min(key_of(r), last);
      const uint8_t* entry = are_in_row ? tile + in_tile * kEntryBytes : keys.at(first_key + in_tile, kEntryBytes);
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
  char* s_queries = cuda_common::swizzled_shared<char>();
  __shared__ Shared<kTokens> s;
  cuda_common::wait_for_previous();
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
  load_weights(job, first_token, num_tokens, s.weights[0]);
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
      desc.width == kWidth && desc.keys.entry_bytes() == kEntryBytes) {
    return true;
  }
  why_not = "needs 64 heads of 128 channels, queries in BF16 and keys in FP4";
  return false;
}

void index_scores(const ops::IndexScores::Desc& /*desc*/, const ops::IndexScores::Args& args, device::Queue& queue) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(kWidth) * static_cast<double>(kHeads)));
  const Job job{static_cast<const uint16_t*>(args.queries.data),
                static_cast<const uint16_t*>(args.weights.data),
                args.keys,
                args.counts,
                args.scores,
                args.stride,
                static_cast<int>(args.num_tokens),
                scale};
  const int64_t tiles = ceil_div<int64_t>(args.stride, kKeys), gpu = cuda_common::multiprocessors();
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
    cuda_common::launch("index_scores", queue, kernel, grid, static_cast<unsigned>(warpgroups * kWarpgroup),
                        static_cast<size_t>(tokens * kQueryBytes), job);
  };
  if (is_many) return start(score_keys<kManyTokens, kManyWarpgroups>);
  // Else tiles are parted, or bulk copies can't begin where they do.
  const bool has_whole_tiles = args.keys.pages != nullptr && args.keys.shift >= kLog2Keys && args.keys.offset % 16 == 0;
  if (has_whole_tiles) return score_paged(job, grid, queue);
  start(score_keys<1, kFewWarpgroups>);
}

}  // namespace tessera::backends::sm90
