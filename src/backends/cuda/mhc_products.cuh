// SPDX-License-Identifier: Apache-2.0
#pragma once
// The first half of mhc_pre, mhc_head and mhc_post_pre: the products of fn's rows with a token's streams, and the sum
// of the streams' squares. Two kernels give the same bits: for few tokens a block has one token and a warp one row; for
// many, a warp keeps three rows of fn in registers while the streams of tokens pass by.
//
// The order of a sum, which no batch changes: a slice is every kSlices-th run of kRun columns; a lane adds four columns
// of each run of its slice, lanes are added by halves, and who reads the sums adds slices in turn.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/peer_packs.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/spread.cuh"

namespace tessera::backends::cuda {

struct MhcJob {
  cuda_common::Values x;  // [tokens, 4, hidden]
  const int32_t* rows;    // which tokens; null: all
  const float *fn, *base, *scale;
  float* sums;            // [rows, coefficients + 1, kSlices], the workspace
  cuda_common::Values y;  // [rows, hidden]
  float *post, *comb;     // null: the head
  int64_t hidden;
  int iterations;
  float hc_eps, norm_eps;
  cuda_common::StreamWrite write;  // of mhc_post_pre, into x; out null: none
  cuda_common::Values weight;      // of its norm
  float eps;

  __device__ int64_t token(int64_t row) const { return rows == nullptr ? row : rows[row]; }
};

struct MhcProducts {
  static constexpr int kS = ops::kHcStreams, kWarp = 32;
  static constexpr int kSlices = 16, kRun = 4 * kWarp, kRound = kSlices * kRun;
  static constexpr int kLoads = 8;  // of four columns that a lane has of a row at once
  // Few tokens: rows of fn, and the streams themselves, that a block multiplies, a warp each. Where a slice has more
  // packs (7,168 channels: 448) one more warp brings the streams.
  static constexpr int kMostRows = 13, kMostThreads = (kMostRows + 1) * kWarp;
  // Many tokens: rows of fn of a warp, tokens that it multiplies at once, stages of which all but one are on their way.
  static constexpr int kMany = 32, kRowsOfWarp = 3, kTokensAtOnce = 4, kStages = 3;
  static constexpr int kMostWarps = ops::kHcCoefficients / kRowsOfWarp, kBlocksAtOnce = 2;

  // Values of a slice of a token's streams.
  TESSERA_HOST_DEVICE static int slice_values(int64_t hidden) {
    return static_cast<int>(ceil_div<int64_t>(kS * hidden, kRound)) * kRun;
  }
};

// A slice of a token's streams for a block: column n kRound + first + q of them is s_slice[n kRun + q], i / hidden the
// stream of column i. Calls function(at, i) for this thread's packs of s_slice and their columns.
template <int kWide, class Function>
__device__ void for_slice(const MhcJob& job, int64_t first, const Function& function) {
  using P = MhcProducts;
  const int64_t width = P::kS * job.hidden;
  const int count = P::slice_values(job.hidden);
  for (int at = static_cast<int>(threadIdx.x) * kWide; at < count; at += static_cast<int>(blockDim.x) * kWide) {
    const int64_t i = at / P::kRun * P::kRound + first + at % P::kRun;
    if (i >= width) break;
    function(at, i);
  }
}

template <int kWide>
__device__ void keep_pack(const cuda_common::Pack<kWide>& values, float* s_slice, int at) {
#pragma unroll
  for (int n = 0; n < kWide; ++n) s_slice[at + n] = values.v[n];
}
// What is written to column i of token t, stored too where this block `stores`.
template <int kWide>
__device__ void keep_written(const MhcJob& job, int64_t t, int64_t i, cuda_common::Pack<kWide> values, bool stores,
                             float* s_slice, int at) {
  cuda_common::round_pack(job.x.is_bf16, values);
  if (stores) cuda_common::store_pack(job.x, t * MhcProducts::kS * job.hidden + i, values);
  keep_pack(values, s_slice, at);
}

// A slice of token t's streams into shared memory. Where they are written first, blocks of `stores` store them.
template <int kWide>
__device__ void take_slice(const MhcJob& job, int64_t t, int64_t first, float* s_slice, bool stores) {
  for_slice<kWide>(job, first, [&](int at, int64_t i) {
    if (job.write.out.data == nullptr) {
      keep_pack(cuda_common::load_pack<kWide>(job.x, t * MhcProducts::kS * job.hidden + i), s_slice, at);
      return;
    }
    const int k = static_cast<int>(i / job.hidden);
    const auto in = job.write.load<kWide, 1>(t, i - k * job.hidden);
    keep_written(job, t, i, job.write.stream(t, k, in), stores, s_slice, at);
  });
}

__device__ inline float add_products(float sum, float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Of a grid of slices by groups of rows of fn, behind which come the streams themselves; by tokens. take(first,
// s_slice, stores) brings the block's slice, and the streams too where the block `stores`, once the kernel before has
// ended.
template <class Take>
__device__ void sum_slice_products(const MhcJob& job, int num_rows, int rows_of_block, const Take& take) {
  using P = MhcProducts;
  float* s_slice = cuda_common::dynamic_shared<float>();
  const int warp = static_cast<int>(threadIdx.x) / P::kWarp, lane = static_cast<int>(threadIdx.x) % P::kWarp;
  const int slice = static_cast<int>(blockIdx.x) % P::kSlices, group = static_cast<int>(blockIdx.x) / P::kSlices;
  const int row = group * rows_of_block + warp;
  const bool has_row = warp < rows_of_block && row < num_rows, is_row = has_row && row + 1 < num_rows;
  const int64_t width = P::kS * job.hidden, first = slice * P::kRun;
  const float* fn = job.fn + row * width;
  float4 factors[P::kLoads];
  const auto load_factors = [&](int64_t begin) {
#pragma unroll
    for (int n = 0; n < P::kLoads; ++n) {
      const int64_t i = begin + n * P::kRound;
      if (is_row && i < width) factors[n] = *reinterpret_cast<const float4*>(fn + i);
    }
  };
  load_factors(first + 4 * lane);
  cuda_common::wait_for_previous();
  take(first, s_slice, group == 0);
  __syncthreads();
  if (!has_row) return;
  float sum = 0;
  const float4* s_values = reinterpret_cast<const float4*>(s_slice) + lane;
  for (int64_t begin = first + 4 * lane; begin < width; begin += P::kLoads * P::kRound) {
    if (begin >= P::kRound) load_factors(begin);
#pragma unroll
    for (int n = 0; n < P::kLoads; ++n) {
      if (begin + n * P::kRound >= width) break;
      const float4 a = *s_values, b = is_row ? factors[n] : a;
      s_values += P::kRun / 4;
      sum = add_products(sum, a, b);
    }
  }
  for (int half = P::kWarp / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  if (lane == 0) job.sums[(static_cast<int64_t>(blockIdx.y) * num_rows + row) * P::kSlices + slice] = sum;
}

template <int kWide>
__global__ void __launch_bounds__(MhcProducts::kMostThreads, MhcProducts::kBlocksAtOnce)
    sum_products(const __grid_constant__ MhcJob job, int num_rows, int rows_of_block) {
  sum_slice_products(job, num_rows, rows_of_block, [&](int64_t first, float* s_slice, bool stores) {
    take_slice<kWide>(job, job.token(blockIdx.y), first, s_slice, stores);
  });
}

// The same where job.write.o is this rank's summand, F32, of what the streams are written with. Blocks that store the
// streams send it, each channel once, and all of them see what the others sent: the slots are freed by the next kernel.
// All blocks are in place at once (have_room_to_wait).
__global__ void __launch_bounds__(MhcProducts::kMostThreads, MhcProducts::kBlocksAtOnce)
    sum_products_of_ranks(const __grid_constant__ MhcJob job, const __grid_constant__ device::PeerView peers,
                          int num_rows, int rows_of_block) {
  using P = MhcProducts;
  constexpr int kWide = cuda_common::kPeerValues, kRanksAtOnce = 2;  // of more, registers are spilt
  sum_slice_products(job, num_rows, rows_of_block, [&](int64_t first, float* s_slice, bool stores) {
    const uint32_t call = device::cuda::begin_peer_call(peers);
    const int64_t t = blockIdx.y, row = t * job.hidden;
    if (stores) {
      for_slice<kWide>(job, first, [&](int, int64_t i) {
        if (i >= job.hidden) return;
        cuda_common::send_to_ranks<true>(peers, call, row + i, cuda_common::load_pack<kWide>(job.write.o, row + i));
      });
    }
    // What does not wait for other ranks is on its way before, and but a few registers are kept meanwhile.
    for_slice<kWide>(job, first, [&](int at, int64_t i) {
      const int k = static_cast<int>(i / job.hidden);
      const int64_t c = i - k * job.hidden;
      const auto own = [&] { return cuda_common::load_pack<kWide>(job.write.o, row + c); };
      cuda_common::Pack<kWide> streams[P::kS];
      job.write.load_streams(t, c, streams);
      const auto mixed = job.write.mixed(t, k, streams);
      const float factor = job.write.factor(t, k);
      const auto o = cuda_common::sum_of_ranks<true, false, kRanksAtOnce>(peers, call, row + c, own);
      keep_written(job, t, i, job.write.written(factor, o, mixed), stores, s_slice, at);
    });
  });
}

// A warp's share of the products of a slice, for many tokens: kRowsOfWarp rows of fn, and the squares of some of the
// tokens. Of each row a lane has kLoads times four columns in registers: all of the slice's (kIsWhole), or one part
// after the other.
template <bool kIsBf16, bool kIsWhole>
class RowProducts {
 public:
  // num_rows: of fn, and one, which is the squares.
  __device__ RowProducts(const MhcJob& job, int slice, int first_row, int num_rows)
      : job_(job), row_(first_row), num_rows_(num_rows), stride_(P::slice_values(job.hidden) / 4) {
    const int64_t width = P::kS * job.hidden, column = slice * P::kRun + 4 * lane();
    fn_ = job.fn + row_ * width + column, width_ = static_cast<int>(width);
    num_loads_ = static_cast<int>(ceil_div<int64_t>(width - column, P::kRound));
    if constexpr (kIsWhole) load(0);
  }

  // Four streams' values as they are stored.
  using Four = std::conditional_t<kIsBf16, uint2, float4>;

  // Tokens [begin, begin + count), whose slices lie at s_slices. count: to kTokensAtOnce. Squares are dealt out to the
  // last warps, which bring less: a warp for them alone would be a third on one scheduler, and the others wait for it.
  __device__ void add(const Four* s_slices, int begin, int count) {
    add_rows(s_slices, begin, count);
    const int num_warps = static_cast<int>(blockDim.x) / P::kWarp;
    for (int t = num_warps - 1 - static_cast<int>(threadIdx.x) / P::kWarp; t < count; t += num_warps) {
      add_squares(s_slices + t * stride_, begin + t);
    }
  }

 private:
  using P = MhcProducts;
  static constexpr int kLoads = kIsWhole ? P::kLoads : P::kLoads / 2;

  __device__ static float4 floats_of(Four four) {
    if constexpr (kIsBf16) {
      return {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xFFFF0000), __uint_as_float(four.y << 16),
              __uint_as_float(four.y & 0xFFFF0000)};
    } else {
      return four;
    }
  }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % P::kWarp; }

  __device__ void load(int first) {
#pragma unroll
    for (int r = 0; r < P::kRowsOfWarp; ++r) {
      if (row_ + r + 1 >= num_rows_) break;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        if (first + n >= num_loads_) break;
        factors_[r][n] = *reinterpret_cast<const float4*>(fn_ + int64_t{r} * width_ + (first + n) * P::kRound);
      }
    }
  }

  // Tokens that are not there are multiplied too (as what lies there), so that sums do not wait for each other.
  __device__ void add_rows(const Four* s_slices, int begin, int count) {
    float sums[P::kTokensAtOnce][P::kRowsOfWarp] = {};
    for (int first = 0; first < num_loads_; first += kLoads) {
      if constexpr (!kIsWhole) load(first);
      const Four* s_values = s_slices + first * P::kWarp + lane();
      if (first + kLoads <= num_loads_) {
        add_loads<true>(s_values, kLoads, sums);
      } else {
        add_loads<false>(s_values, num_loads_ - first, sums);
      }
      if constexpr (kIsWhole) break;
    }
#pragma unroll
    for (int t = 0; t < P::kTokensAtOnce; ++t) store(begin + t, t < count, sums[t]);
  }

  // kAll: count is kLoads, and nothing is asked between loads.
  template <bool kAll>
  __device__ void add_loads(const Four* s_values, int count, float (&sums)[P::kTokensAtOnce][P::kRowsOfWarp]) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (!kAll && n >= count) break;
#pragma unroll
      for (int t = 0; t < P::kTokensAtOnce; ++t) {
        const float4 a = floats_of(s_values[t * stride_ + n * P::kWarp]);
#pragma unroll
        for (int r = 0; r < P::kRowsOfWarp; ++r) sums[t][r] = add_products(sums[t][r], a, factors_[r][n]);
      }
    }
  }

  __device__ void add_squares(const Four* s_slice, int token) const {
    float sum = 0;
    for (int n = 0; n < num_loads_; ++n) {
      const float4 a = floats_of(s_slice[n * P::kWarp + lane()]);
      sum = add_products(sum, a, a);
    }
    for (int half = P::kWarp / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
    if (lane() == 0) sum_of(token, num_rows_ - 1) = sum;
  }

  // Adds lanes by halves. A lane keeps, at the first two halvings, those of the three rows that its half goes on with.
  __device__ void store(int token, bool is_there, const float (&sums)[P::kRowsOfWarp]) const {
    static_assert(P::kRowsOfWarp == 3);
    const auto kept = [](float mine, float theirs, int mask) { return mine + __shfl_xor_sync(~0u, theirs, mask); };
    const bool high = (lane() & 16) != 0, high_pair = (lane() & 8) != 0;
    const float one = kept(high ? sums[2] : sums[0], high ? sums[0] : sums[2], 16);
    const float other = kept(sums[1], sums[1], 16);
    float sum = kept(high_pair ? other : one, high_pair ? one : other, 8);
    for (int half = 4; half > 0; half /= 2) sum = kept(sum, sum, half);
    const int r = (high ? 2 : 0) + (high_pair ? 1 : 0), row = row_ + r;
    const bool is_row = is_there && r < P::kRowsOfWarp && row + 1 < num_rows_;
    if (is_row && lane() % 8 == 0) sum_of(token, row) = sum;
  }

  // Worked out where it is needed: an address that is kept would be one register too many.
  __device__ float& sum_of(int token, int row) const {
    return job_.sums[(int64_t{token} * num_rows_ + row) * P::kSlices + blockIdx.x];
  }

  const MhcJob& job_;
  const float* fn_;
  int row_, num_rows_, stride_, width_, num_loads_;
  float4 factors_[P::kRowsOfWarp][kLoads];
};

// Grid: slices, by shares of the tokens. The streams are there already (`write` is none).
template <bool kIsBf16, bool kIsWhole>
__global__ void __launch_bounds__(MhcProducts::kMostWarps* MhcProducts::kWarp, MhcProducts::kBlocksAtOnce)
    sum_products_of_many(const __grid_constant__ MhcJob job, int num_rows, int num_tokens) {
  using P = MhcProducts;
  using Products = RowProducts<kIsBf16, kIsWhole>;
  constexpr int kChunk = kIsBf16 ? 8 : 4, kChunksOfRun = P::kRun / kChunk;  // columns of a copy
  auto* s_slices = cuda_common::dynamic_shared<typename Products::Four>();
  const int fours = P::slice_values(job.hidden) / 4, width = static_cast<int>(P::kS * job.hidden);
  const int first = static_cast<int>(blockIdx.x) * P::kRun;
  const int step = static_cast<int>(gridDim.y) * P::kTokensAtOnce;
  Products products(job, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x) / P::kWarp * P::kRowsOfWarp,
                    num_rows);
  const auto bring = [&](int begin, int stage) {
    const int chunks = fours * 4 / kChunk;
    const char* streams = static_cast<const char*>(job.x.data);
    for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += static_cast<int>(blockDim.x)) {
      const int column = chunk / kChunksOfRun * P::kRound + first + chunk % kChunksOfRun * kChunk;
      if (column >= width) break;
      auto* to = s_slices + stage * P::kTokensAtOnce * fours + chunk * (kChunk / 4);
#pragma unroll
      for (int t = 0; t < P::kTokensAtOnce; ++t) {
        if (begin + t >= num_tokens) break;
        cuda_common::ptx::copy_async<16>(to + t * fours,
                                         streams + (job.token(begin + t) * width + column) * (16 / kChunk));
      }
    }
    cuda_common::ptx::commit_copies();
  };
  cuda_common::wait_for_previous();
  int begin = static_cast<int>(blockIdx.y) * P::kTokensAtOnce;
  for (int stage = 0; stage + 1 < P::kStages; ++stage) bring(begin + stage * step, stage);
  for (int stage = 0; begin < num_tokens; begin += step) {
    cuda_common::ptx::wait_for_copies<P::kStages - 2>();
    __syncthreads();
    bring(begin + (P::kStages - 1) * step, (stage + P::kStages - 1) % P::kStages);
    products.add(s_slices + stage * P::kTokensAtOnce * fours, begin, min(num_tokens - begin, P::kTokensAtOnce));
    stage = (stage + 1) % P::kStages;
  }
}

// Whether so many tokens have the kernel for many, which copies sixteen bytes at once and writes no streams.
inline bool are_many(const MhcJob& job, int64_t num_tokens) {
  return num_tokens >= MhcProducts::kMany && job.hidden % 2 == 0;
}

// Blocks of so few tokens' products, as a grid.
inline dim3 products_grid(int num_rows, int64_t num_tokens) {
  using P = MhcProducts;
  return {static_cast<unsigned>(P::kSlices * ceil_div(num_rows, P::kMostRows)), static_cast<unsigned>(num_tokens)};
}
inline int products_rows(int num_rows) {
  return ceil_div(num_rows, ceil_div(num_rows, MhcProducts::kMostRows));
}
inline unsigned products_block(int num_rows, int64_t hidden) {
  using P = MhcProducts;
  const int packs = ceil_div(P::slice_values(hidden), 4);
  return static_cast<unsigned>(
      std::clamp(round_up(packs, P::kWarp), products_rows(num_rows) * P::kWarp, P::kMostThreads));
}

// Whether sum_products_of_ranks has all its blocks in place at once. Those of an emulated GPU run one after another, so
// there one rank alone can make such a call, or one that finds in its slots what the others sent.
inline bool have_room_to_wait(int num_rows, int64_t num_tokens) {
#ifdef TESSERA_CUDA_EMULATED
  constexpr int64_t kEmulatedTokens = 8;
  return num_rows > 0 && num_tokens <= kEmulatedTokens;
#else
  const dim3 grid = products_grid(num_rows, num_tokens);
  return int64_t{grid.x} * grid.y <= int64_t{MhcProducts::kBlocksAtOnce} * cuda_common::multiprocessors();
#endif
}

inline void launch_products_of_ranks(const char* name, const MhcJob& job, const device::PeerView& peers, int num_rows,
                                     int64_t num_tokens, device::Queue& queue) {
  // Of few tokens, each block on a multiprocessor of its own: as many are in place at once as the GPU has of those, if
  // nobody else has kernels there.
  const dim3 grid = products_grid(num_rows, num_tokens);
  const auto shared_bytes = static_cast<size_t>(MhcProducts::slice_values(job.hidden)) * sizeof(float);
  cuda_common::launch(name, queue, sum_products_of_ranks, grid, products_block(num_rows, job.hidden),
                      cuda_common::spread_bytes(queue, shared_bytes, int64_t{grid.x} * grid.y), job, peers, num_rows,
                      products_rows(num_rows));
}

// num_rows: of fn, and one.
inline void launch_products(const char* name, const MhcJob& job, int num_rows, int64_t num_tokens,
                            device::Queue& queue) {
  using P = MhcProducts;
  const int values = P::slice_values(job.hidden);
  if (are_many(job, num_tokens)) {
    const int64_t shares =
        std::min(ceil_div<int64_t>(num_tokens, P::kTokensAtOnce),
                 std::max<int64_t>(P::kBlocksAtOnce * cuda_common::multiprocessors() / P::kSlices, 1));
    const int warps = ceil_div(num_rows - 1, P::kRowsOfWarp);
    const bool is_whole = values <= P::kLoads * P::kRun;
    const auto kernel = job.x.is_bf16
                            ? (is_whole ? sum_products_of_many<true, true> : sum_products_of_many<true, false>)
                            : (is_whole ? sum_products_of_many<false, true> : sum_products_of_many<false, false>);
    const int stage_bytes = P::kTokensAtOnce * values * (job.x.is_bf16 ? 2 : 4);
    cuda_common::launch(name, queue, kernel, dim3(P::kSlices, static_cast<unsigned>(shares)),
                        static_cast<unsigned>(warps * P::kWarp), static_cast<size_t>(P::kStages * stage_bytes), job,
                        num_rows, static_cast<int>(num_tokens));
    return;
  }
  cuda_common::launch(name, queue, cuda_common::has_packs(job.hidden) ? sum_products<4> : sum_products<1>,
                      products_grid(num_rows, num_tokens), products_block(num_rows, job.hidden),
                      static_cast<size_t>(values) * sizeof(float), job, num_rows, products_rows(num_rows));
}

}  // namespace tessera::backends::cuda
