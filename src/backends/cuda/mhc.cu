// SPDX-License-Identifier: Apache-2.0
// mhc_pre, mhc_head and mhc_post_pre, two kernels each: thread blocks that have a slice of a token's streams and some
// rows of fn; then thread blocks that mix a token's streams, and one for the coefficients of what comes after the
// layer. mhc_post_pre lets the first kernel write the streams before it multiplies them, and one block mix a token's,
// which then has the row to normalise.
#include "backends/cuda/kernels.h"
#include "backends/cuda/stream_write.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kS = ops::kHcStreams;
constexpr int kWarp = 32;
// A slice is every kSlices-th run of kRun columns.
constexpr int kSlices = 16, kRun = 4 * kWarp, kRound = kSlices * kRun;
constexpr int kMostRows = 13;  // of fn, and the streams themselves, that a block multiplies: a warp each
constexpr int kMixBlock = 128, kMixChannels = 4 * kMixBlock;
constexpr int kNormBlock = 512;

struct Job {
  Values x;             // [tokens, 4, hidden]
  const int32_t* rows;  // which tokens; null: all
  const float *fn, *base, *scale;
  float* sums;         // [rows, kCoefficients + 1, kSlices], the workspace
  Values y;            // [rows, hidden]
  float *post, *comb;  // null: the head
  int64_t hidden;
  int iterations;
  float hc_eps, norm_eps;
  StreamWrite write;  // of mhc_post_pre, into x; out null: none
  Values weight;      // of its norm
  float eps;
};

__device__ float sigmoid(float x) {
  return 1 / (1 + exp_rounded(-x));
}

// Lane 4 j + k holds C[j][k]; every sum ascends, as in sinkhorn_reference. All of the warp takes part.
__device__ float sinkhorn(float c, int lane, int iterations, float eps) {
  const int j = lane / kS, k = lane % kS;
  const auto row_value = [&](int i) { return __shfl_sync(~0u, c, j * kS + i, kLanes); };
  const auto column_value = [&](int i) { return __shfl_sync(~0u, c, i * kS + k, kLanes); };
  const auto divide = [&](const auto& value_at, float added) {
    float sum = 0;
    for (int i = 0; i < kS; ++i) sum += value_at(i);
    c /= sum + added;
  };
  float max = row_value(0);
  for (int i = 1; i < kS; ++i) {
    const float other = row_value(i);
    max = max < other ? other : max;
  }
  c = exp_rounded(c - max);
  divide(row_value, 0.0f);
  c += eps;
  divide(column_value, eps);
  for (int i = 1; i < iterations; ++i) {
    divide(row_value, eps);
    divide(column_value, eps);
  }
  return c;
}

// A slice of token t's streams, in shared memory: column n kRound + first + q of them is s_slice[n kRun + q]. Where
// they are written first, blocks of `stores` store them.
template <int kWide>
__device__ void take_slice(const Job& job, int64_t t, int64_t first, float* s_slice, bool stores) {
  const int64_t width = kS * job.hidden;
  const int count = static_cast<int>((width - first + kRound - 1) / kRound) * kRun;
  for (int at = static_cast<int>(threadIdx.x) * kWide; at < count; at += static_cast<int>(blockDim.x) * kWide) {
    const int64_t i = at / kRun * kRound + first + at % kRun;
    if (i >= width) break;
    Pack<kWide> values;
    if (job.write.out.data == nullptr) {
      values = load_pack<kWide>(job.x, t * width + i);
    } else {
      const int k = static_cast<int>(i / job.hidden);
      values = job.write.stream(t, k, job.write.load<kWide, 1>(t, i - k * job.hidden));
      round_pack(job.x.is_bf16, values);
      if (stores) store_pack(job.x, t * width + i, values);
    }
#pragma unroll
    for (int n = 0; n < kWide; ++n) s_slice[at + n] = values.v[n];
  }
}

// Grid: slices by groups of rows of fn, behind which come the streams themselves; by tokens. Of a row's products a lane
// adds four columns of every kRound, then lanes are added by halves, and who reads the sums adds slices in turn: an
// order of its own that no batch changes.
template <int kWide>
__global__ void __launch_bounds__(kMostRows* kWarp, 2) sum_products(const __grid_constant__ Job job, int num_rows) {
  float* s_slice = dynamic_shared<float>();
  constexpr int kLoads = 8;  // of four columns that are on their way at once
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slice = static_cast<int>(blockIdx.x) % kSlices, group = static_cast<int>(blockIdx.x) / kSlices;
  const int row = group * static_cast<int>(blockDim.x) / kWarp + warp;
  const bool is_row = row + 1 < num_rows;
  const int64_t width = kS * job.hidden, first = slice * kRun;
  const float* fn = job.fn + row * width;
  float4 factors[kLoads];
  const auto load_factors = [&](int64_t begin) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t i = begin + n * kRound;
      if (is_row && i < width) factors[n] = *reinterpret_cast<const float4*>(fn + i);
    }
  };
  load_factors(first + 4 * lane);
  wait_for_previous();
  const int64_t t = job.rows == nullptr ? blockIdx.y : job.rows[blockIdx.y];
  take_slice<kWide>(job, t, first, s_slice, group == 0);
  __syncthreads();
  if (row >= num_rows) return;
  float sum = 0;
  const float4* s_values = reinterpret_cast<const float4*>(s_slice) + lane;
  for (int64_t begin = first + 4 * lane; begin < width; begin += kLoads * kRound) {
    if (begin >= kRound) load_factors(begin);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (begin + n * kRound >= width) break;
      const float4 a = *s_values, b = is_row ? factors[n] : a;
      s_values += kRun / 4;
      sum += a.x * b.x;
      sum += a.y * b.y;
      sum += a.z * b.z;
      sum += a.w * b.w;
    }
  }
  for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  if (lane == 0) job.sums[(static_cast<int64_t>(blockIdx.y) * num_rows + row) * kSlices + slice] = sum;
}

// m, and behind it the sum of squares, by the first threads of a block; others see them after the next barrier.
template <int kCoefficients>
__device__ void take_sums(const Job& job, int64_t row, float* s_m) {
  const int at = static_cast<int>(threadIdx.x);
  if (at > kCoefficients) return;
  const float4* slices = reinterpret_cast<const float4*>(job.sums + (row * (kCoefficients + 1) + at) * kSlices);
  float4 parts[kSlices / 4];
#pragma unroll
  for (int n = 0; n < kSlices / 4; ++n) parts[n] = slices[n];
  float sum = parts[0].x;
#pragma unroll
  for (int n = 0; n < kSlices / 4; ++n) {
    if (n > 0) sum += parts[n].x;
    sum += parts[n].y;
    sum += parts[n].z;
    sum += parts[n].w;
  }
  s_m[at] = sum;
}

// What a lane's coefficients are made of besides m.
struct Bases {
  float pre, post, comb, scales[3];
};
__device__ Bases load_bases(const Job& job) {
  const int lane = threadIdx.x % kLanes, j = lane % kS;
  return {job.base[j], job.base[kS + j], job.base[2 * kS + lane], {job.scale[0], job.scale[1], job.scale[2]}};
}

// 1 / RMS of the streams.
template <int kCoefficients>
__device__ float stream_factor(const Job& job, const float* s_m) {
  return 1 / sqrtf(s_m[kCoefficients] / static_cast<float>(kS * job.hidden) + job.norm_eps);
}

// The coefficients of what comes after the layer. A warp.
__device__ void store_coefficients(const Job& job, int64_t row, const float* s_m, float rr, const Bases& bases) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const float post = s_m[kS + lane % kS] * rr * bases.scales[1] + bases.post;
  if (thread < kS) job.post[row * kS + lane % kS] = 2 * sigmoid(post);
  const float c = sinkhorn(s_m[2 * kS + lane] * rr * bases.scales[2] + bases.comb, lane, job.iterations, job.hc_eps);
  if (thread < kLanes) job.comb[row * kS * kS + lane] = c;
}

__device__ float pre_coefficient(const Job& job, float m, float rr, float scale, float base) {
  return sigmoid(m * rr * scale + base) + job.hc_eps;
}

// Grid: tokens by pieces of kMixChannels; where there are coefficients of the layer's output, they are a piece of their
// own.
template <int kCoefficients>
__global__ void __launch_bounds__(kMixBlock) mix(Job job) {
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
  take_sums<kCoefficients>(job, row, s_m);
  __syncthreads();
  const float rr = stream_factor<kCoefficients>(job, s_m);
  if (!is_piece) {
    if constexpr (kCoefficients > kS) {
      if (threadIdx.x < kWarp) store_coefficients(job, row, s_m, rr, bases);
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
template <int kWide>
class Mixer {
 public:
  // Loads what can be before the coefficients are known.
  __device__ Mixer(const Job& job, int64_t t) : job_(job), base_(t * kS * job.hidden) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n, ahead_[n]);
  }
  __device__ void mix(const float* s_pre, float* s_y) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) store(n, ahead_[n], s_pre, s_y);
    for (int n = kAhead; first(n) < job_.hidden; ++n) {
      Pack<kWide> streams[kS];
      load(n, streams);
      store(n, streams, s_pre, s_y);
    }
  }

 private:
  static constexpr int kAhead = 2;
  __device__ static int64_t first(int n) {
    return (n * kNormBlock + static_cast<int64_t>(threadIdx.x)) * kWide;
  }
  __device__ void load(int n, Pack<kWide> (&streams)[kS]) const {
    if (first(n) >= job_.hidden) return;
#pragma unroll
    for (int j = 0; j < kS; ++j) streams[j] = load_pack<kWide>(job_.x, base_ + j * job_.hidden + first(n));
  }
  __device__ void store(int n, const Pack<kWide> (&streams)[kS], const float* s_pre, float* s_y) const {
    if (first(n) >= job_.hidden) return;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      float y = 0;
#pragma unroll
      for (int j = 0; j < kS; ++j) y += s_pre[j] * streams[j].v[i];
      s_y[first(n) + i] = round_to(job_.y.is_bf16, y);
    }
  }

  const Job& job_;
  const int64_t base_;
  Pack<kWide> ahead_[kAhead][kS];
};

// Grid: tokens, by two: the first block mixes and normalises, the second has the coefficients.
template <int kWide>
__global__ void __launch_bounds__(kNormBlock) mix_and_norm(const __grid_constant__ Job job) {
  constexpr int kCoefficients = ops::kHcCoefficients;
  __shared__ float s_m[kCoefficients + 1], s_pre[kS], s_factor;
  float* s_y = dynamic_shared<float>();
  const int64_t t = blockIdx.x, hidden = job.hidden;
  const bool is_mixing = blockIdx.y == 0;
  constexpr int64_t kBatch = int64_t{kPerThread} * kNormBlock;
  float weights[kPerThread];
  const auto load_weights = [&](int64_t begin) {
    for_columns(begin, hidden,
                [&](int i, int64_t c) { weights[i] = job.weight.data != nullptr ? job.weight[c] : 1.0f; });
  };
  const Bases bases = load_bases(job);
  if (is_mixing) load_weights(0);
  wait_for_previous();
  if (!is_mixing) {
    take_sums<kCoefficients>(job, t, s_m);
    __syncthreads();
    const float rr = stream_factor<kCoefficients>(job, s_m);
    if (threadIdx.x < kWarp) store_coefficients(job, t, s_m, rr, bases);
    return;
  }
  const Mixer<kWide> mixer(job, t);
  take_sums<kCoefficients>(job, t, s_m);
  __syncthreads();
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
  for (int64_t begin = 0; begin < hidden; begin += kBatch) {
    if (begin > 0) load_weights(begin);
    for_columns(begin, hidden, [&](int i, int64_t c) { job.y.store(t * hidden + c, s_y[c] * factor * weights[i]); });
  }
}

void launch_products(const char* name, const Job& job, int num_rows, int64_t num_tokens, device::Queue& queue) {
  const int groups = ceil_div(num_rows, kMostRows), warps = ceil_div(num_rows, groups);
  const size_t floats = static_cast<size_t>(ceil_div<int64_t>(kS * job.hidden, kRound)) * kRun;
  launch(name, queue, has_packs(job.hidden) ? sum_products<4> : sum_products<1>,
         dim3(static_cast<unsigned>(kSlices * groups), static_cast<unsigned>(num_tokens)),
         static_cast<unsigned>(warps * kWarp), floats * sizeof(float), job, num_rows);
}

template <int kCoefficients>
void run(const char* name, const Job& job, int64_t num_rows, device::Queue& queue) {
  launch_products(name, job, kCoefficients + 1, num_rows, queue);
  const int64_t pieces = ceil_div<int64_t>(job.hidden, kMixChannels) + (kCoefficients > kS ? 1 : 0);
  launch(name, queue, mix<kCoefficients>, dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(pieces)),
         kMixBlock, 0, job);
}

Job pre_job(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, void* workspace) {
  Job job{};
  job.x = values_of(args.x), job.y = values_of(args.y);
  job.fn = args.fn, job.base = args.base, job.scale = args.scale;
  job.sums = static_cast<float*>(workspace);
  job.post = args.post, job.comb = args.comb;
  job.hidden = desc.hidden, job.iterations = desc.sinkhorn_iterations;
  job.hc_eps = desc.hc_eps, job.norm_eps = desc.norm_eps;
  return job;
}

}  // namespace

int64_t mhc_workspace(const ops::MhcDesc&, int64_t max_tokens) {
  return max_tokens * (ops::kHcCoefficients + 1) * kSlices * static_cast<int64_t>(sizeof(float));
}

void mhc_pre(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, device::Queue& queue) {
  run<ops::kHcCoefficients>("mhc_pre", pre_job(desc, args, args.workspace), args.num_tokens, queue);
}

void mhc_head(const ops::MhcDesc& desc, const ops::MhcHead::Args& args, device::Queue& queue) {
  Job job{};
  job.x = values_of(args.x), job.y = values_of(args.h), job.rows = args.rows;
  job.fn = args.fn, job.base = args.base, job.scale = args.scale;
  job.sums = static_cast<float*>(args.workspace);
  job.hidden = desc.hidden, job.hc_eps = desc.hc_eps, job.norm_eps = desc.norm_eps;
  run<kS>("mhc_head", job, args.num_rows, queue);
}

bool mhc_post_pre_supports(const ops::MhcPostPre::Desc& desc, std::string& why_not) {
  return ops::mhc_post_pre_reference_supports(desc, why_not) && (!desc.norm || rms_norm_supports(*desc.norm, why_not));
}

int64_t mhc_post_pre_workspace(const ops::MhcPostPre::Desc& desc, int64_t max_tokens) {
  return desc.norm ? mhc_workspace(desc.mhc, max_tokens) : 0;
}

void mhc_post_pre(const ops::MhcPostPre::Desc& desc, const ops::MhcPostPre::Args& args, device::Queue& queue) {
  StreamWrite write{};
  if (desc.has_post) {
    write = stream_write(desc.mhc, args.post);
    if (desc.combine) {
      write.o.data = nullptr;
      write.experts = {values_of(args.combine.routed), values_of(args.combine.shared), desc.combine->top_k,
                       desc.combine->hidden};
    }
    if (!desc.norm) return write_streams(write, args.num_tokens, queue);
  }
  if (!desc.norm) return;
  Job job = pre_job(desc.mhc, args.pre, args.workspace);
  job.write = write;
  job.weight = values_of(args.weight), job.eps = desc.norm->eps;
  launch_products("mhc_post_pre", job, ops::kHcCoefficients + 1, args.num_tokens, queue);
  const dim3 grid(static_cast<unsigned>(args.num_tokens), 2);
  launch("mhc_post_pre", queue, has_packs(job.hidden) ? mix_and_norm<4> : mix_and_norm<1>, grid, kNormBlock,
         static_cast<size_t>(job.hidden) * sizeof(float), job);
}

}  // namespace tessera::backends::cuda
