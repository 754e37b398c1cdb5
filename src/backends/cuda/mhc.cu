// SPDX-License-Identifier: Apache-2.0
// mhc_pre, mhc_head and mhc_post_pre, two kernels each: products of slices of tokens' streams with fn
// (mhc_products.cuh); then thread blocks that mix a token's streams, and one for the coefficients of what comes after
// the layer. mhc_post_pre lets the first kernel write the streams before it multiplies them (of many tokens where what
// is written with is there in BF16), and one block mix a token's, which then has the row to normalise; of many tokens
// four, since a row's sum of squares is one chain of additions to each of 16 lanes, and nothing else goes on in its
// block meanwhile. Where ranks add up what the streams are written with, of few tokens the first kernel makes that sum
// too, and the second frees the slots.
#include <type_traits>

#include "backends/cuda/kernels.h"
#include "backends/cuda/mhc_products.cuh"
#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/peer_packs.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kS = ops::kHcStreams, kWarp = 32;
constexpr int kMixBlock = 128, kMixChannels = 4 * kMixBlock;
constexpr int kNormBlock = 512, kNormWarps = kNormBlock / kWarp;

__device__ float sigmoid(float x) {
  return 1 / (1 + exp_rounded(-x));
}

// Lane 4 j + k holds C[j][k]; every sum ascends, as in sinkhorn_reference. All of the warp takes part. Each of some
// 40 divisions waits for the one before.
__device__ float sinkhorn(float c, int lane, int iterations, float eps) {
  const int j = lane / kS, k = lane % kS;
  const auto row_value = [&](int i) { return __shfl_sync(~0u, c, j * kS + i, kLanes); };
  const auto column_value = [&](int i) { return __shfl_sync(~0u, c, i * kS + k, kLanes); };
  const auto sum_of = [&](const auto& value_at) {
    float sum = value_at(0);  // none is -0
    for (int i = 1; i < kS; ++i) sum += value_at(i);
    return sum;
  };
  float max = row_value(0);
  for (int i = 1; i < kS; ++i) {
    const float other = row_value(i);
    max = max < other ? other : max;
  }
  c = exp_rounded(c - max);
  c /= sum_of(row_value);
  c += eps;
  // Values are eps or more now, and none of the divisions, of which 20 iterations have 39, is by more than 4 + 5 eps:
  // so none leaves what divide_usual() takes.
  const auto go_on = [&](const auto& divide) {
    c = divide(c, sum_of(column_value) + eps);
#pragma unroll 1
    for (int i = 1; i < iterations; ++i) {
      c = divide(c, sum_of(row_value) + eps);
      c = divide(c, sum_of(column_value) + eps);
    }
  };
  constexpr float kLeastEps = 0x1p-21f;
  constexpr int kMostIterations = 20;
  if (eps >= kLeastEps && eps <= 1 && iterations <= kMostIterations) {
    go_on(ptx::divide_usual);
  } else {
    go_on([](float a, float b) { return a / b; });
  }
  return c;
}

// What a lane's coefficients are made of besides m.
struct Bases {
  float pre, post, comb, scales[3];
};
__device__ Bases load_bases(const MhcJob& job) {
  const int lane = threadIdx.x % kLanes, j = lane % kS;
  return {job.base[j], job.base[kS + j], job.base[2 * kS + lane], {job.scale[0], job.scale[1], job.scale[2]}};
}

// 1 / RMS of the streams.
template <int kCoefficients>
__device__ float stream_factor(const MhcJob& job, const float* s_m) {
  return 1 / sqrtf(s_m[kCoefficients] / static_cast<float>(kS * job.hidden) + job.norm_eps);
}

// The coefficients of what comes after the layer: of its output, and of the streams. A warp each.
__device__ void store_post(const MhcJob& job, int64_t row, const float* s_m, float rr, const Bases& bases) {
  const int lane = static_cast<int>(threadIdx.x) % kS;
  const float post = 2 * sigmoid(s_m[kS + lane] * rr * bases.scales[1] + bases.post);
  if (threadIdx.x % kWarp < kS) job.post[row * kS + lane] = post;
}
__device__ void store_comb(const MhcJob& job, int64_t row, const float* s_m, float rr, const Bases& bases) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const float c = sinkhorn(s_m[2 * kS + lane] * rr * bases.scales[2] + bases.comb, lane, job.iterations, job.hc_eps);
  if (threadIdx.x % kWarp < kLanes) job.comb[row * kS * kS + lane] = c;
}

__device__ float pre_coefficient(const MhcJob& job, float m, float rr, float scale, float base) {
  return sigmoid(m * rr * scale + base) + job.hc_eps;
}

// Grid: tokens by pieces of kMixChannels; where there are coefficients of the layer's output, they are a piece of their
// own.
template <int kCoefficients>
__global__ void __launch_bounds__(kMixBlock) mix(MhcJob job) {
  __shared__ float s_m[kCoefficients + 1], s_pre[kS];
  const bool is_piece = blockIdx.y * int64_t{kMixChannels} < job.hidden;
  Bases bases{};
  if constexpr (kCoefficients > kS) {
    bases = load_bases(job);
  } else {
    bases.pre = job.base[threadIdx.x % kS], bases.scales[0] = job.scale[0];
  }
  wait_for_previous();
  const int64_t row = blockIdx.x, t = job.rows == nullptr ? row : job.rows[row];
  const int64_t width = kS * job.hidden, base = t * width;
  const int64_t first = blockIdx.y * int64_t{kMixChannels} + threadIdx.x;
  constexpr int kEach = kMixChannels / kMixBlock;
  float values[kEach][kS];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * kMixBlock;
    if (i >= job.hidden) break;
#pragma unroll
    for (int j = 0; j < kS; ++j) values[n][j] = job.x[base + j * job.hidden + i];
  }
  add_slices(job, kCoefficients + 1, row, static_cast<int>(threadIdx.x), kMixBlock, s_m);
  __syncthreads();
  const float rr = stream_factor<kCoefficients>(job, s_m);
  if (!is_piece) {
    if constexpr (kCoefficients > kS) {
      if (threadIdx.x < kWarp) store_comb(job, row, s_m, rr, bases);
      if (threadIdx.x / kWarp == 1) store_post(job, row, s_m, rr, bases);
    }
    return;
  }
  if (threadIdx.x < kS) {
    s_pre[threadIdx.x] = pre_coefficient(job, s_m[threadIdx.x], rr, bases.scales[0], bases.pre);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * kMixBlock;
    if (i >= job.hidden) break;
    float y = 0;
#pragma unroll
    for (int j = 0; j < kS; ++j) y += s_pre[j] * values[n][j];
    job.y.store(row * job.hidden + i, y);
  }
}

// A token's mixed streams, packs of channels of every kNormBlock by a thread, into shared memory.
template <int kWide, bool kIsBf16>
class Mixer {
 public:
  // BF16 waits as it lies, in half the registers, so that all of 8,192 channels may.
  static constexpr int kAhead = kIsBf16 ? 4 : 2;
  // Loads what can be before the coefficients are known.
  __device__ Mixer(const MhcJob& job, int64_t t) : job_(job), base_(t * kS * job.hidden) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n, ahead_[n]);
  }
  __device__ void mix(const float* s_pre, float* s_y) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) store(n, ahead_[n], s_pre, s_y);
    for (int n = kAhead; first(n) < job_.hidden; ++n) {
      Words streams[kS];
      load(n, streams);
      store(n, streams, s_pre, s_y);
    }
  }
  __device__ static int64_t first(int n) {
    return (n * kNormBlock + static_cast<int64_t>(threadIdx.x)) * kWide;
  }

 private:
  using Words = std::conditional_t<kIsBf16, uint2, Pack<kWide>>;
  __device__ void load(int n, Words (&streams)[kS]) const {
    if (first(n) >= job_.hidden) return;
#pragma unroll
    for (int j = 0; j < kS; ++j) {
      const int64_t at = base_ + j * job_.hidden + first(n);
      if constexpr (kIsBf16) {
        streams[j] = load_bf16_words(job_.x, at);
      } else {
        streams[j] = load_pack<kWide>(job_.x, at);
      }
    }
  }
  __device__ static Pack<kWide> values_of(const Words& words) {
    if constexpr (kIsBf16) {
      return pack_of(words);
    } else {
      return words;
    }
  }
  __device__ void store(int n, const Words (&streams)[kS], const float* s_pre, float* s_y) const {
    if (first(n) >= job_.hidden) return;
    Pack<kWide> y;
#pragma unroll
    for (int j = 0; j < kS; ++j) {
      const Pack<kWide> values = values_of(streams[j]);
#pragma unroll
      for (int i = 0; i < kWide; ++i) y.v[i] += s_pre[j] * values.v[i];
    }
    round_pack(job_.y.is_bf16, y);
    store_pack(Values{s_y, false}, first(n), y);
  }

  const MhcJob& job_;
  const int64_t base_;
  Words ahead_[kAhead][kS];
};

// Sums of up to kNormWarps tokens by a block, four warps on each: one after the other, a warp's loads would wait for
// each other.
constexpr int kThreadsOfSums = 4 * kWarp;
__device__ void take_sums_of(int64_t first, int count, const MhcJob& job,
                             float (&s_sums)[kNormWarps][ops::kHcCoefficients + 1]) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int t = thread / kThreadsOfSums; t < count; t += kNormBlock / kThreadsOfSums) {
    add_slices(job, ops::kHcCoefficients + 1, first + t, thread % kThreadsOfSums, kThreadsOfSums, s_sums[t]);
  }
  __syncthreads();
}

// Of kNormWarps tokens from `first` on. A warp makes one token's matrix and another's output coefficients; of up to
// half of them no warp makes both.
__device__ void store_coefficients_of(int64_t first, int64_t num_tokens, const MhcJob& job,
                                      float (&s_sums)[kNormWarps][ops::kHcCoefficients + 1], const Bases& bases) {
  const int count = static_cast<int>(min(num_tokens - first, int64_t{kNormWarps}));
  take_sums_of(first, count, job, s_sums);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, other = (warp + kNormWarps / 2) % kNormWarps;
  const auto factor_of = [&](int t) { return stream_factor<ops::kHcCoefficients>(job, s_sums[t]); };
  if (warp < count) store_comb(job, first + warp, s_sums[warp], factor_of(warp), bases);
  if (other < count) store_post(job, first + other, s_sums[other], factor_of(other), bases);
}

// Blocks that mix and normalise a token each, then blocks that have the coefficients of a token in each warp.
TESSERA_HOST_DEVICE int64_t mixing_blocks(int64_t num_tokens) {
  return num_tokens + ceil_div<int64_t>(num_tokens, kNormWarps);
}

template <int kWide, bool kIsBf16>
__device__ void mix_and_norm_token(const MhcJob& job, int64_t num_tokens) {
  constexpr int kCoefficients = ops::kHcCoefficients;
  using Mixing = Mixer<kWide, kIsBf16>;
  __shared__ float s_sums[kNormWarps][kCoefficients + 1], s_pre[kS], s_factor;
  float *s_y = dynamic_shared<float>(), *s_m = s_sums[0];
  const int64_t t = blockIdx.x, hidden = job.hidden;
  Pack<kWide> weights[Mixing::kAhead];
  const auto weights_at = [&](int64_t c) {
    Pack<kWide> pack;
#pragma unroll
    for (float& weight : pack.v) weight = 1;
    if (job.weight.data != nullptr && c < hidden) pack = load_pack<kWide>(job.weight, c);
    return pack;
  };
  const Bases bases = load_bases(job);
  if (t < num_tokens) {
#pragma unroll
    for (int n = 0; n < Mixing::kAhead; ++n) weights[n] = weights_at(Mixing::first(n));
  }
  wait_alone();
  if (t >= num_tokens) {
    let_next_begin();
    store_coefficients_of((t - num_tokens) * kNormWarps, num_tokens, job, s_sums, bases);
    return;
  }
  const Mixing mixer(job, t);
  add_slices(job, kCoefficients + 1, t, static_cast<int>(threadIdx.x), kNormBlock, s_m);
  __syncthreads();
  let_next_begin();
  if (threadIdx.x < kS) {
    const float rr = stream_factor<kCoefficients>(job, s_m);
    s_pre[threadIdx.x] = pre_coefficient(job, s_m[threadIdx.x], rr, bases.scales[0], bases.pre);
  }
  __syncthreads();
  mixer.mix(s_pre, s_y);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const float factor = norm_factor(s_y, hidden, job.eps);
    if (threadIdx.x == 0) s_factor = factor;
  }
  __syncthreads();
  const float factor = s_factor;
  const auto store = [&](int64_t c, const Pack<kWide>& weight) {
    Pack<kWide> y = load_pack<kWide>({s_y, false}, c);
#pragma unroll
    for (int i = 0; i < kWide; ++i) y.v[i] = y.v[i] * factor * weight.v[i];
    store_pack(job.y, t * hidden + c, y);
  };
#pragma unroll
  for (int n = 0; n < Mixing::kAhead; ++n) {
    if (Mixing::first(n) < hidden) store(Mixing::first(n), weights[n]);
  }
  for (int n = Mixing::kAhead; Mixing::first(n) < hidden; ++n) store(Mixing::first(n), weights_at(Mixing::first(n)));
}

// Grid: mixing_blocks.
template <int kWide, bool kIsBf16>
__global__ void __launch_bounds__(kNormBlock) mix_and_norm(const __grid_constant__ MhcJob job, int64_t num_tokens) {
  mix_and_norm_token<kWide, kIsBf16>(job, num_tokens);
}

// The same behind sum_products_of_ranks; further blocks free what its blocks have read, a slot or a few a thread.
constexpr int64_t kSlotsToFree = 4 * kNormBlock;
template <bool kIsF32>
__global__ void __launch_bounds__(kNormBlock)
    mix_and_norm_of_ranks(const __grid_constant__ MhcJob job, const __grid_constant__ device::PeerView peers,
                          int64_t num_tokens) {
  const auto first = static_cast<unsigned>(mixing_blocks(num_tokens));
  if (blockIdx.x < first) return mix_and_norm_token<kPeerValues, true>(job, num_tokens);
  wait_for_previous();
  free_slots<kIsF32>(peers, num_tokens * job.hidden, first);
}

// The same for many tokens in BF16, kManyTokens of them to a block. Rows lie in shared memory as they are rounded.
constexpr int kManyTokens = 4, kWide = 4;
__global__ void __launch_bounds__(kNormBlock, 2)
    mix_and_norm_many(const __grid_constant__ MhcJob job, int64_t num_tokens) {
  constexpr int kCoefficients = ops::kHcCoefficients;
  __shared__ float s_sums[kNormWarps][kCoefficients + 1], s_pre[kManyTokens][kS], s_factors[kManyTokens];
  const Values s_rows{dynamic_shared<uint16_t>(), true};
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int hidden = static_cast<int>(job.hidden);
  const int64_t groups = ceil_div<int64_t>(num_tokens, kManyTokens), first = blockIdx.x * int64_t{kManyTokens};
  const int count = static_cast<int>(min(num_tokens - first, int64_t{kManyTokens}));
  const Bases bases = load_bases(job);
  wait_for_previous();
  if (blockIdx.x >= groups) {
    store_coefficients_of((blockIdx.x - groups) * kNormWarps, num_tokens, job, s_sums, bases);
    return;
  }
  take_sums_of(first, count, job, s_sums);
  if (warp < count) {
    const float rr = stream_factor<kCoefficients>(job, s_sums[warp]);
    if (lane < kS) s_pre[warp][lane] = pre_coefficient(job, s_sums[warp][lane], rr, bases.scales[0], bases.pre);
  }
  __syncthreads();
  constexpr int kStep = kNormBlock * kWide;
  for (int t = 0; t < count; ++t) {
    const int64_t base = (first + t) * kS * hidden;
#pragma unroll 2
    for (int c = static_cast<int>(threadIdx.x) * kWide; c < hidden; c += kStep) {
      Pack<kWide> streams[kS], y;
#pragma unroll
      for (int j = 0; j < kS; ++j) streams[j] = load_pack<kWide>(job.x, base + j * hidden + c);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
#pragma unroll
        for (int j = 0; j < kS; ++j) y.v[i] += s_pre[t][j] * streams[j].v[i];
      }
      store_pack<kWide>(s_rows, t * hidden + c, y);
    }
  }
  __syncthreads();
  if (warp < ceil_div(count, kWarp / kLanes)) {
    const int t = min(warp * (kWarp / kLanes) + lane / kLanes, count - 1);
    const auto* row = static_cast<const uint16_t*>(s_rows.data) + t * hidden;
    const float factor = norm_factor(Values{const_cast<uint16_t*>(row), true}, hidden, job.eps);
    if (lane % kLanes == 0) s_factors[t] = factor;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x) * kWide; c < hidden; c += kStep) {
    Pack<kWide> weights{{1, 1, 1, 1}};
    if (job.weight.data != nullptr) weights = load_pack<kWide>(job.weight, c);
    for (int t = 0; t < count; ++t) {
      Pack<kWide> y = load_pack<kWide>(s_rows, t * hidden + c);
#pragma unroll
      for (int i = 0; i < kWide; ++i) y.v[i] = y.v[i] * s_factors[t] * weights.v[i];
      store_pack<kWide>(job.y, (first + t) * hidden + c, y);
    }
  }
}

void launch_mix_and_norm(const MhcJob& job, int64_t num_tokens, device::Queue& queue) {
  const bool is_many =
      job.y.is_bf16 && job.x.is_bf16 && has_packs(job.hidden) && num_tokens >= 2 * kManyTokens * multiprocessors();
  if (is_many) {
    launch("mhc_post_pre", queue, mix_and_norm_many,
           grid_for(ceil_div<int64_t>(num_tokens, kManyTokens) + ceil_div<int64_t>(num_tokens, kNormWarps), 1),
           kNormBlock, kManyTokens * static_cast<size_t>(job.hidden) * sizeof(uint16_t), job, num_tokens);
    return;
  }
  const auto kernel = !has_packs(job.hidden) ? mix_and_norm<1, false>
                      : job.x.is_bf16        ? mix_and_norm<4, true>
                                             : mix_and_norm<4, false>;
  launch("mhc_post_pre", queue, kernel, grid_for(mixing_blocks(num_tokens), 1), kNormBlock,
         static_cast<size_t>(job.hidden) * sizeof(float), job, num_tokens);
}

void launch_mix_and_norm_of_ranks(const MhcJob& job, const device::PeerView& peers, int64_t num_tokens,
                                  device::Queue& queue) {
  const int64_t values = num_tokens * job.hidden;
  const bool is_f32 = !job.write.o.is_bf16;
  const int64_t slots =
      (peers.world - 1) * (is_f32 ? PeerSummand<true>::num_slots(values) : PeerSummand<false>::num_slots(values));
  const int64_t freeing_blocks = std::max<int64_t>(ceil_div(slots, kSlotsToFree), 1);  // one ends the call
  launch("mhc_post_pre", queue, is_f32 ? mix_and_norm_of_ranks<true> : mix_and_norm_of_ranks<false>,
         grid_for(mixing_blocks(num_tokens) + freeing_blocks, 1), kNormBlock,
         static_cast<size_t>(job.hidden) * sizeof(float), job, peers, num_tokens);
}

template <int kCoefficients>
void run(const char* name, const MhcJob& job, int64_t num_rows, device::Queue& queue) {
  launch_products(name, job, kCoefficients + 1, num_rows, queue);
  const int64_t pieces = ceil_div<int64_t>(job.hidden, kMixChannels) + (kCoefficients > kS ? 1 : 0);
  launch(name, queue, mix<kCoefficients>, dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(pieces)),
         kMixBlock, 0, job);
}

MhcJob pre_job(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, int64_t num_tokens, void* workspace) {
  MhcJob job{};
  job.x = values_of(args.x), job.y = values_of(args.y);
  job.fn = args.fn, job.base = args.base, job.scale = args.scale;
  job.sums = static_cast<float*>(workspace);
  job.post = args.post, job.comb = args.comb;
  cut_in_slices(job, desc.hidden, ops::kHcCoefficients + 1, num_tokens);
  job.iterations = desc.sinkhorn_iterations, job.hc_eps = desc.hc_eps, job.norm_eps = desc.norm_eps;
  return job;
}

}  // namespace

int64_t mhc_workspace(const ops::MhcDesc& desc, int64_t max_tokens) {
  const int64_t sums = MhcProducts::slice_sums(max_tokens, ops::kHcCoefficients + 1) * MhcProducts::slices(desc.hidden);
  return sums * static_cast<int64_t>(sizeof(float));
}

void mhc_pre(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, device::Queue& queue) {
  run<ops::kHcCoefficients>("mhc_pre", pre_job(desc, args, args.num_tokens, args.workspace), args.num_tokens, queue);
}

void mhc_head(const ops::MhcDesc& desc, const ops::MhcHead::Args& args, device::Queue& queue) {
  MhcJob job{};
  job.x = values_of(args.x), job.y = values_of(args.h), job.rows = args.rows;
  job.fn = args.fn, job.base = args.base, job.scale = args.scale;
  job.sums = static_cast<float*>(args.workspace);
  cut_in_slices(job, desc.hidden, kS + 1, args.num_rows);
  job.hc_eps = desc.hc_eps, job.norm_eps = desc.norm_eps;
  run<kS>("mhc_head", job, args.num_rows, queue);
}

bool mhc_post_pre_supports(const ops::MhcPostPre::Desc& desc, std::string& why_not) {
  const int64_t together = !desc.combine ? kPeerRun : desc.norm ? 2 * kPeerValues : kPeerValues;
  if (desc.sums_ranks && (desc.mhc.hidden % together != 0 || desc.mhc.activation != DType::kBF16)) {
    why_not = "ranks add into BF16, of experts four channels at a time, eight with a norm, of F32 128";
    return false;
  }
  return ops::mhc_post_pre_parts_agree(desc, why_not) && (!desc.norm || rms_norm_supports(*desc.norm, why_not));
}

int64_t mhc_post_pre_workspace(const ops::MhcPostPre::Desc& desc, int64_t max_tokens) {
  return desc.norm ? mhc_workspace(desc.mhc, max_tokens) : 0;
}

void mhc_post_pre(const ops::MhcPostPre::Desc& desc, const ops::MhcPostPre::Args& args, device::Queue& queue) {
  constexpr int kRows = ops::kHcCoefficients + 1;
  const int64_t n = args.num_tokens;
  StreamWrite write{};
  if (desc.has_post) {
    write = stream_write(desc.mhc, args.post);
    if (desc.combine) {
      if (!desc.sums_ranks) write.o.data = nullptr;
      write.experts = {values_of(args.combine.routed), values_of(args.combine.shared), desc.combine->top_k,
                       desc.combine->hidden};
    }
  }
  const auto write_whole = [&] {
    desc.sums_ranks ? write_sums_of_ranks(write, *args.peers, n, queue) : write_streams(write, n, queue);
  };
  if (!desc.norm) {
    if (desc.has_post) write_whole();
    return;
  }
  MhcJob job = pre_job(desc.mhc, args.pre, n, args.workspace);
  job.weight = values_of(args.weight), job.eps = desc.norm->eps;
  if (desc.sums_ranks && have_room_to_wait(desc.mhc.hidden, n)) {
    job.write = write;
    launch_products_of_ranks("mhc_post_pre", job, *args.peers, kRows, n, queue);
    return launch_mix_and_norm_of_ranks(job, *args.peers, n, queue);
  }
  job.write = write;
  if (desc.has_post && (desc.sums_ranks || (n >= MhcProducts::kMany && !writes_many(job, kRows, n)))) {
    write_whole();
    job.write = {};
  }
  launch_products("mhc_post_pre", job, kRows, n, queue);
  launch_mix_and_norm(job, n, queue);
}

}  // namespace tessera::backends::cuda
