// SPDX-License-Identifier: Apache-2.0
#pragma once
// The first half of mhc_pre, mhc_head and mhc_post_pre: the products of fn's rows with a token's streams, and the sum
// of the streams' squares, by blocks that have a slice of the columns (mhc_slices.cuh) and a warp for each run of it
// (mhc_run_products.cuh, which says in what order sums are made). Kernels for few tokens, for few whose streams are
// written with a sum over ranks, and for many give the same bits.
#include <algorithm>

#include "backends/cuda/mhc_run_products.cuh"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/peer_packs.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/spread.cuh"

namespace tessera::backends::cuda {

// Packs of kWide channels of a slice, which has so many, of `count` tokens: calls function(token of the block, channel
// of the slice).
template <int kWide, class Function>
__device__ void for_packs(const cuda_common::FastDivisor& packs, int count, const Function& function) {
  const int packs_of_token = static_cast<int>(packs.divisor());
  for (int at = static_cast<int>(threadIdx.x); at < count * packs_of_token; at += static_cast<int>(blockDim.x)) {
    const int token = static_cast<int>(packs.quotient(static_cast<uint32_t>(at)));
    function(token, (at - token * packs_of_token) * kWide);
  }
}

// A pack of a slice's stream into shared memory.
template <class Stored, int kWide>
__device__ void keep_pack(const cuda_common::Pack<kWide>& values, Stored* s_values) {
  if constexpr (sizeof(Stored) == 2) {
    cuda_common::store_pack(cuda_common::Values{s_values, true}, 0, values);
  } else {
#pragma unroll
    for (int n = 0; n < kWide; ++n) s_values[n] = values.v[n];
  }
}

// Of a grid of slices by shares of the tokens. take(begin, count, first channel, s_streams) brings the block's tokens'
// streams once the kernel before has ended.
template <bool kIsEight, class Stored, class Take>
__device__ void sum_slice_products(const MhcJob& job, int num_sums, int64_t num_rows, int tokens_of_block,
                                   const Take& take) {
  using P = MhcProducts;
  const int slice = static_cast<int>(blockIdx.x), row_values = P::row_values(job.channels);
  const int64_t begin = int64_t{blockIdx.y} * tokens_of_block;
  const int count = static_cast<int>(min(num_rows - begin, int64_t{tokens_of_block}));
  auto* s_streams = cuda_common::dynamic_shared<Stored>();
  auto* s_sums = reinterpret_cast<float*>(s_streams + P::kTokens * row_values);
  const RunProducts<kIsEight> products(job, slice, num_sums);
  cuda_common::wait_for_previous();
  take(begin, count, slice * job.channels, s_streams);
  __syncthreads();
  products.store(products.multiply(s_streams, row_values), 0, tokens_of_block, s_sums);
  __syncthreads();
  add_runs<1>(job, s_sums, slice, num_sums, begin, count * num_sums, tokens_of_block);
}

// Few tokens, kTokens at most of a block; where the streams are written first, it does that too. kWide: 4 where
// channels are a multiple of eight, else 1.
template <int kWide, class Stored>
__global__ void __launch_bounds__(MhcProducts::kMostThreads)
    sum_products(const __grid_constant__ MhcJob job, int num_sums, int64_t num_rows, int tokens_of_block,
                 const __grid_constant__ cuda_common::FastDivisor packs) {
  using P = MhcProducts;
  sum_slice_products<(kWide > 1), Stored>(
      job, num_sums, num_rows, tokens_of_block, [&](int64_t begin, int count, int first, Stored* s_streams) {
        const int channels = job.channels, row_values = P::row_values(channels);
        for_packs<kWide>(packs, count, [&](int n, int channel) {
          const int64_t t = job.token(begin + n), c = first + channel;
          cuda_common::Pack<kWide> streams[P::kS];
          const bool is_there = c < job.hidden, writes = job.write.out.data != nullptr;
          if (is_there && !writes) {
#pragma unroll
            for (int k = 0; k < P::kS; ++k) {
              streams[k] = cuda_common::load_pack<kWide>(job.x, (t * P::kS + k) * job.hidden + c);
            }
          } else if (is_there) {
            const auto in = job.write.load<kWide, cuda_common::kSlotsAtOnce, true>(t, c);
#pragma unroll
            for (int k = 0; k < P::kS; ++k) {
              streams[k] = job.write.stream(t, k, in);
              cuda_common::store_pack(job.x, (t * P::kS + k) * job.hidden + c, streams[k]);
            }
          }
#pragma unroll
          for (int k = 0; k < P::kS; ++k) keep_pack(streams[k], s_streams + n * row_values + k * channels + channel);
        });
      });
}

// What a token's streams are written with, in shared memory: comb [kMost, 4, 4], then post [kMost, 4].
template <int kMost>
struct WriteCoefficients {
  using P = MhcProducts;
  static constexpr int kOfToken = P::kS * P::kS + P::kS, kBytes = kMost * kOfToken * static_cast<int>(sizeof(float));
  static constexpr int kCopy = 16;  // bytes

  float *comb, *post;

  __device__ explicit WriteCoefficients(float* s_all) : comb(s_all), post(s_all + kMost * P::kS * P::kS) {}
  // Copies those of `count` tokens from t on, up to kMost; all threads.
  __device__ void bring(const cuda_common::StreamWrite& write, int64_t t, int64_t count) const {
    for (int i = static_cast<int>(threadIdx.x); i < kMost * (P::kS + 1); i += static_cast<int>(blockDim.x)) {
      const int n = i % kMost, j = i / kMost;
      if (n >= count) continue;
      const bool is_comb = j < P::kS;
      cuda_common::ptx::copy_async<kCopy>(
          is_comb ? comb + (n * P::kS + j) * P::kS : post + n * P::kS,
          is_comb ? write.comb + ((t + n) * P::kS + j) * P::kS : write.post + (t + n) * P::kS);
    }
  }
};

// What a block of sum_products_of_ranks has in shared memory behind its streams and sums: the coefficients that streams
// are written with, and what this rank's experts gave.
struct RankInputs {
  using P = MhcProducts;
  using Coefficients = WriteCoefficients<P::kTokens>;

  Coefficients coefficients;
  uint16_t* of_experts;  // [tokens, channels], BF16

  TESSERA_HOST_DEVICE static int begin(int channels, int num_tokens, int num_sums) {
    const int runs = P::threads(channels) / P::kWarp;
    return round_up(P::kTokens * P::row_values(channels) * 2 + runs * num_tokens * num_sums * 4, Coefficients::kCopy);
  }
  TESSERA_HOST_DEVICE static int bytes(int channels, int num_tokens) {
    return Coefficients::kBytes + num_tokens * channels * 2;
  }
  __device__ RankInputs(void* s_block, int channels, int num_tokens, int num_sums)
      : coefficients(reinterpret_cast<float*>(static_cast<char*>(s_block) + begin(channels, num_tokens, num_sums))),
        of_experts(reinterpret_cast<uint16_t*>(coefficients.comb + P::kTokens * Coefficients::kOfToken)) {}
};

// The same where the streams are written with a sum over ranks, of job.write.o in F32 or of what this rank's experts
// gave (job.write.o in BF16, which nobody writes): each block sends its channels and sees what the others sent. What
// does not wait for other ranks is on its way before anything is sent: streams go where they will be multiplied. The
// slots are freed by the next kernel, off the way of what waits here. All blocks are in place at once
// (have_room_to_wait).
template <bool kIsF32>
__global__ void __launch_bounds__(MhcProducts::kMostThreads)
    sum_products_of_ranks(const __grid_constant__ MhcJob job, const __grid_constant__ device::PeerView peers,
                          int num_sums, int64_t num_rows, int tokens_of_block,
                          const __grid_constant__ cuda_common::FastDivisor packs) {
  using P = MhcProducts;
  constexpr int kWide = cuda_common::kPeerValues, kRanksAtOnce = 2;  // of more, registers are spilt
  sum_slice_products<true, uint16_t>(
      job, num_sums, num_rows, tokens_of_block, [&](int64_t begin, int count, int first, uint16_t* s_streams) {
        const int channels = job.channels, row_values = P::row_values(channels);
        const RankInputs inputs(s_streams, channels, tokens_of_block, num_sums);
        for_packs<kWide>(packs, count, [&](int n, int channel) {
          if (first + channel >= job.hidden) return;
          const auto* from =
              static_cast<const uint16_t*>(job.write.x.data) + (begin + n) * P::kS * job.hidden + first + channel;
#pragma unroll
          for (int k = 0; k < P::kS; ++k) {
            cuda_common::ptx::copy_async<kWide * 2>(s_streams + n * row_values + k * channels + channel,
                                                    from + k * job.hidden);
          }
        });
        inputs.coefficients.bring(job.write, begin, count);
        cuda_common::ptx::commit_copies();
        const uint32_t call = device::cuda::begin_peer_call(peers);
        const auto load_own = [&](int n, int channel) {
          if constexpr (kIsF32) {
            return cuda_common::load_pack<kWide>(job.write.o, (begin + n) * job.hidden + first + channel);
          } else {
            return cuda_common::load_pack<kWide>({inputs.of_experts, true}, n * channels + channel);
          }
        };
        for_packs<kWide>(packs, count, [&](int n, int channel) {
          const int64_t t = begin + n, c = first + channel;
          if (c >= job.hidden) return;
          if constexpr (!kIsF32) {
            keep_pack(job.write.experts.together<kWide, cuda_common::kSlotsAtOnce>(t, c),
                      inputs.of_experts + n * channels + channel);
          }
          cuda_common::send_to_ranks<kIsF32>(peers, call, t * job.hidden + c, load_own(n, channel));
        });
        cuda_common::ptx::wait_for_copies<0>();
        __syncthreads();
        cuda_common::StreamWrite write = job.write;
        write.comb = inputs.coefficients.comb, write.post = inputs.coefficients.post;
        for_packs<kWide>(packs, count, [&](int n, int channel) {
          const int64_t t = begin + n, c = first + channel, i = t * job.hidden + c;
          uint16_t* s_pack = s_streams + n * row_values + channel;
          cuda_common::Pack<kWide> streams[P::kS], mixed[P::kS];
          if (c < job.hidden) {
#pragma unroll
            for (int k = 0; k < P::kS; ++k) streams[k] = cuda_common::load_pack<kWide>({s_pack, true}, k * channels);
#pragma unroll
            for (int k = 0; k < P::kS; ++k) mixed[k] = write.mixed(n, k, streams);
            const auto o = cuda_common::sum_of_ranks<kIsF32, false, kRanksAtOnce>(peers, call, i,
                                                                                  [&] { return load_own(n, channel); });
#pragma unroll
            for (int k = 0; k < P::kS; ++k) {
              mixed[k] = write.written(write.factor(n, k), o, mixed[k]);
              cuda_common::store_pack(job.x, (t * P::kS + k) * job.hidden + c, mixed[k]);
            }
          }
#pragma unroll
          for (int k = 0; k < P::kS; ++k) keep_pack(mixed[k], s_pack + k * channels);
        });
      });
}

// What a block of many tokens has of kManyTokens at once: their streams in BF16, what those are written with, and the
// coefficients of that.
struct ManyTokens {
  using P = MhcProducts;
  using Coefficients = WriteCoefficients<P::kManyTokens>;
  static constexpr int kWide = 8;  // values of a copy

  int channels, row_values;

  TESSERA_HOST_DEVICE explicit ManyTokens(int channels_of_slice)
      : channels(channels_of_slice), row_values(P::row_values(channels_of_slice)) {}
  TESSERA_HOST_DEVICE int stream_values() const { return P::kManyTokens * row_values; }
  TESSERA_HOST_DEVICE int output_values() const { return P::kManyTokens * channels; }
  // In units of BF16 values.
  TESSERA_HOST_DEVICE int stage_values(bool writes) const {
    return stream_values() + (writes ? output_values() + Coefficients::kBytes / 2 : 0);
  }
};

// Grid: slices, by shares of the tokens, BF16. kWrites: the streams are written first, from job.write.o in BF16.
template <bool kWrites>
__global__ void __launch_bounds__(MhcProducts::kMostThreads)
    sum_products_of_many(const __grid_constant__ MhcJob job, int num_sums, int num_rows, int num_stages) {
  using P = MhcProducts;
  constexpr int kWide = ManyTokens::kWide;
  const ManyTokens tokens(job.channels);
  const int slice = static_cast<int>(blockIdx.x), channels = tokens.channels, hidden = static_cast<int>(job.hidden);
  const int first = slice * channels, packs = channels / kWide, thread = static_cast<int>(threadIdx.x);
  const int stage_values = tokens.stage_values(kWrites);
  const int step = static_cast<int>(gridDim.y) * P::kManyTokens;
  auto* s_stages = cuda_common::dynamic_shared<uint16_t>();
  auto* s_sums = reinterpret_cast<float*>(s_stages + num_stages * stage_values);
  const RunProducts<true> products(job, slice, num_sums);
  if (first + channels > hidden) {  // the last slice's channels that are not there
    for (int i = thread; i < num_stages * stage_values; i += static_cast<int>(blockDim.x)) s_stages[i] = 0;
    __syncthreads();
  }
  // A block has as many threads as a token has packs of its streams, four times, and as all tokens have of one.
  const int pack = thread % packs, of_tokens = thread / packs;
  const bool is_there = first + pack * kWide < hidden;
  const auto bring = [&](int begin, int stage) {
    uint16_t* s_streams = s_stages + stage * stage_values;
    const auto* x = static_cast<const uint16_t*>(kWrites ? job.write.x.data : job.x.data);
    const int k = of_tokens % P::kS, n = of_tokens / P::kS;
    const uint16_t* from = x + (int64_t{begin + n} * P::kS + k) * hidden + first + pack * kWide;
    uint16_t* s_to = s_streams + n * tokens.row_values + k * channels + pack * kWide;
    constexpr int kEvery = P::kManyTokens / P::kS;
#pragma unroll
    for (int i = 0; i < P::kS; ++i) {
      if (begin + n + i * kEvery < num_rows && is_there) {
        cuda_common::ptx::copy_async<16>(s_to + i * kEvery * tokens.row_values, from + i * kEvery * P::kS * hidden);
      }
    }
    if constexpr (kWrites) {
      uint16_t* s_outputs = s_streams + tokens.stream_values();
      const ManyTokens::Coefficients coefficients(reinterpret_cast<float*>(s_outputs + tokens.output_values()));
      const auto* o = static_cast<const uint16_t*>(job.write.o.data);
      if (begin + of_tokens < num_rows && is_there) {
        cuda_common::ptx::copy_async<16>(s_outputs + thread * kWide,
                                         o + int64_t{begin + of_tokens} * hidden + first + pack * kWide);
      }
      coefficients.bring(job.write, begin, num_rows - begin);
    }
    cuda_common::ptx::commit_copies();
  };
  const auto write = [&](int begin, int stage) {
    if (begin + of_tokens >= num_rows || !is_there) return;
    uint16_t* s_streams = s_stages + stage * stage_values;
    uint16_t* s_outputs = s_streams + tokens.stream_values();
    const ManyTokens::Coefficients coefficients(reinterpret_cast<float*>(s_outputs + tokens.output_values()));
    cuda_common::StreamWrite here = job.write;
    here.comb = coefficients.comb, here.post = coefficients.post;
    uint16_t* s_token = s_streams + of_tokens * tokens.row_values + pack * kWide;
    const int64_t to = (int64_t{begin} + of_tokens) * P::kS * hidden + first + pack * kWide;
#pragma unroll
    for (int part = 0; part < kWide; part += 4) {
      cuda_common::StreamWrite::Inputs<4> in;
#pragma unroll
      for (int k = 0; k < P::kS; ++k) in.streams[k] = cuda_common::load_pack<4>({s_token, true}, k * channels + part);
      in.o = cuda_common::load_pack<4>({s_outputs, true}, thread * kWide + part);
#pragma unroll
      for (int k = 0; k < P::kS; ++k) {
        cuda_common::store_pack(cuda_common::Values{s_token, true}, k * channels + part, here.stream(of_tokens, k, in));
      }
    }
#pragma unroll
    for (int k = 0; k < P::kS; ++k) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.x.data) + to + int64_t{k} * hidden) =
          *reinterpret_cast<const uint4*>(s_token + k * channels);
    }
  };
  cuda_common::wait_for_previous();
  int begin = static_cast<int>(blockIdx.y) * P::kManyTokens;
  for (int stage = 0; stage + 1 < num_stages; ++stage) bring(begin + stage * step, stage);
  for (int stage = 0; begin < num_rows; begin += step) {
    num_stages == P::kMostStages ? cuda_common::ptx::wait_for_copies<P::kMostStages - 2>()
                                 : cuda_common::ptx::wait_for_copies<0>();
    __syncthreads();
    bring(begin + (num_stages - 1) * step, (stage + num_stages - 1) % num_stages);
    if constexpr (kWrites) {
      write(begin, stage);
      __syncthreads();
    }
    const uint16_t* s_streams = s_stages + stage * stage_values;
#pragma unroll
    for (int n = 0; n < P::kManyTokens; n += P::kTokens) {
      products.store(products.multiply(s_streams + n * tokens.row_values, tokens.row_values), n, P::kManyTokens,
                     s_sums);
    }
    __syncthreads();
    add_runs<4>(job, s_sums, slice, num_sums, begin, min(job.slice_sums - begin * num_sums, P::kManyTokens * num_sums),
                P::kManyTokens);
    stage = (stage + 1) % num_stages;
  }
}

// Stages that many tokens have room for; 0: none, or they are not as that kernel takes them (chosen rows, F32, channels
// that are no multiple of eight): the kernel for few takes any number.
inline int stages_of_many(const MhcJob& job, int num_sums, int64_t num_tokens, bool writes, size_t& shared_bytes) {
  using P = MhcProducts;
  if (num_tokens < P::kMany || !job.x.is_bf16 || job.rows != nullptr || job.hidden % ManyTokens::kWide != 0) return 0;
  const int runs = P::threads(job.channels) / P::kWarp;
  const size_t sum_bytes = sizeof(float) * static_cast<size_t>(runs * P::kManyTokens * num_sums);
  const size_t stage_bytes = sizeof(uint16_t) * static_cast<size_t>(ManyTokens(job.channels).stage_values(writes));
  for (int stages = P::kMostStages; stages > 1; --stages) {
    shared_bytes = static_cast<size_t>(stages) * stage_bytes + sum_bytes;
    if (shared_bytes <= cuda_common::most_shared_bytes()) return stages;
  }
  return 0;
}

// Tokens of a block of few, of eight of which each thread has one pack of four channels; and what it has in shared
// memory.
inline int tokens_of_block(int64_t num_tokens) {
  return static_cast<int>(std::clamp<int64_t>(num_tokens, 1, MhcProducts::kTokens));
}
inline dim3 products_grid(int slices, int64_t num_tokens) {
  return {static_cast<unsigned>(slices),
          static_cast<unsigned>(ceil_div<int64_t>(num_tokens, tokens_of_block(num_tokens)))};
}
inline size_t products_bytes(const MhcJob& job, int num_sums, int64_t num_tokens) {
  using P = MhcProducts;
  const int runs = P::threads(job.channels) / P::kWarp;
  return static_cast<size_t>(P::kTokens * P::row_values(job.channels)) *
             (job.x.is_bf16 ? sizeof(uint16_t) : sizeof(float)) +
         static_cast<size_t>(runs * tokens_of_block(num_tokens) * num_sums) * sizeof(float);
}

inline cuda_common::FastDivisor slice_packs(const MhcJob& job, int wide) {
  return cuda_common::FastDivisor(static_cast<uint32_t>(job.channels / wide));
}

// Whether sum_products_of_ranks has all its blocks in place at once. Those of an emulated GPU run one after another, so
// there one rank alone can make such a call, or one that finds in its slots what the others sent.
inline bool have_room_to_wait(int64_t hidden, int64_t num_tokens) {
  if (num_tokens == 0 || num_tokens >= MhcProducts::kMany) return false;
#ifdef TESSERA_CUDA_EMULATED
  constexpr int64_t kEmulatedTokens = 8;
  return hidden > 0 && num_tokens <= kEmulatedTokens;
#else
  const dim3 grid = products_grid(MhcProducts::slices(hidden), num_tokens);
  return int64_t{grid.x} * grid.y <= cuda_common::multiprocessors();
#endif
}

inline void launch_products_of_ranks(const char* name, const MhcJob& job, const device::PeerView& peers, int num_sums,
                                     int64_t num_tokens, device::Queue& queue) {
  // Each block on a multiprocessor of its own: as many are in place at once as the GPU has of those, if nobody else has
  // kernels there.
  const dim3 grid = products_grid(job.slices, num_tokens);
  const int of_block = tokens_of_block(num_tokens);
  const auto shared_bytes = static_cast<size_t>(RankInputs::begin(job.channels, of_block, num_sums) +
                                                RankInputs::bytes(job.channels, of_block));
  const auto kernel = job.write.o.is_bf16 ? sum_products_of_ranks<false> : sum_products_of_ranks<true>;
  cuda_common::launch(name, queue, kernel, grid, static_cast<unsigned>(MhcProducts::threads(job.channels)),
                      cuda_common::spread_bytes(queue, shared_bytes, int64_t{grid.x} * grid.y), job, peers, num_sums,
                      num_tokens, of_block, slice_packs(job, cuda_common::kPeerValues));
}

// Whether the kernel for many can write the streams, if there are so many.
inline bool writes_many(const MhcJob& job, int num_sums, int64_t num_tokens) {
  size_t shared_bytes = 0;
  return job.write.o.data != nullptr && job.write.o.is_bf16 &&
         stages_of_many(job, num_sums, num_tokens, true, shared_bytes) > 0;
}
// num_sums: rows of fn, and one. Streams that job.write gives are written first; of kMany and more where writes_many().
inline void launch_products(const char* name, const MhcJob& job, int num_sums, int64_t num_tokens,
                            device::Queue& queue) {
  using P = MhcProducts;
  const auto threads = static_cast<unsigned>(P::threads(job.channels));
  const bool writes = job.write.out.data != nullptr;
  size_t shared_bytes = 0;
  if (const int stages = stages_of_many(job, num_sums, num_tokens, writes, shared_bytes); stages > 0) {
    const int slices = job.slices;
    const int64_t at_once = cuda_common::multiprocessors() * (P::kMostThreads / P::threads(job.channels));
    const int64_t shares =
        std::min(ceil_div<int64_t>(num_tokens, P::kManyTokens), std::max<int64_t>(at_once / slices, 1));
    cuda_common::launch(name, queue, writes ? sum_products_of_many<true> : sum_products_of_many<false>,
                        dim3(static_cast<unsigned>(slices), static_cast<unsigned>(shares)), threads, shared_bytes, job,
                        num_sums, static_cast<int>(num_tokens), stages);
    return;
  }
  const bool is_bf16 = job.x.is_bf16, is_eight = job.hidden % 8 == 0;
  const auto start = [&](auto kernel) {
    cuda_common::launch(name, queue, kernel, products_grid(job.slices, num_tokens), threads,
                        products_bytes(job, num_sums, num_tokens), job, num_sums, num_tokens,
                        tokens_of_block(num_tokens), slice_packs(job, is_eight ? 4 : 1));
  };
  if (is_bf16) {
    start(is_eight ? sum_products<4, uint16_t> : sum_products<1, uint16_t>);
  } else {
    start(is_eight ? sum_products<4, float> : sum_products<1, float>);
  }
}

}  // namespace tessera::backends::cuda
