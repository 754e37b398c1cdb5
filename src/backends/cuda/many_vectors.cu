// SPDX-License-Identifier: Apache-2.0
// A thread block has up to 64 vectors of a token (32 where blocks would be few), so that sines and cosines are worked
// out once for them, or 16 rows, and a warp four at a time. What bounds it is the read and the write of the vectors.
// Their order of sums is that of norm_factor(): for it a warp's vectors go through shared memory, where eight lanes
// have two of a vector's 16 sums each.
#include "backends/cuda/many_vectors.cuh"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kWarp = 32, kWarps = 8, kBlock = kWarps * kWarp;
constexpr int kAtOnce = 4, kMostBlockVectors = 64;  // of a warp; of a block
constexpr int kNormWidth = 512, kHadamardWidth = 128, kMostRopeDim = 256;
constexpr int64_t kFewest = 12;  // vectors to a multiprocessor: fewer are a matter of latency

struct Job {
  ManyVectors all;
  int block_vectors, groups;  // groups of so many, of a row
};

// This block's vectors: [begin, end) of all.
struct Share {
  int64_t row, begin, end;
};
__device__ Share share_of_block(const Job& job) {
  const int64_t row = blockIdx.x / job.groups,
                first = static_cast<int64_t>(blockIdx.x) % job.groups * job.block_vectors;
  const int64_t base = row * job.all.vectors;
  return {row, base + first, base + min(first + job.block_vectors, static_cast<int64_t>(job.all.vectors))};
}

// Cosines, then sines, of the row's position; all threads.
__device__ void take_turns(const ManyVectors& all, int64_t row, float* s_turns) {
  const int pairs = all.rope_dim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * pairs; i += kBlock) {
    const double angle = rotary_angle(all.positions[row], all.frequencies[i % pairs]);
    s_turns[i] = i < pairs ? rotary_cosine(angle) : rotary_sine(angle, all.is_inverse);
  }
  __syncthreads();
}

// What a lane needs to rotate its kValues neighbouring channels from `first` on.
template <int kValues>
struct Turns {
  bool has_any;
  float cosines[kValues / 2], sines[kValues / 2];

  __device__ Turns(const ManyVectors& all, const float* s_turns, int first) {
    const int pair = (first - (all.width - all.rope_dim)) / 2;
    has_any = first >= all.width - all.rope_dim;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      cosines[i] = has_any ? s_turns[pair + i] : 1;
      sines[i] = has_any ? s_turns[all.rope_dim / 2 + pair + i] : 0;
    }
  }
  __device__ void turn(float (&values)[kValues]) const {
    if (!has_any) return;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float a = values[2 * i], b = values[2 * i + 1];
      values[2 * i] = round_to(true, rotated_first(a, b, cosines[i], sines[i]));
      values[2 * i + 1] = round_to(true, rotated_second(a, b, cosines[i], sines[i]));
    }
  }
};

__device__ float low_bf16(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000);
}

// Of values that are BF16 already.
__device__ uint32_t exact_pair(float first, float second) {
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

// norm_factor() of four vectors of BF16 in shared memory, a warp's: of vector lane / 8, which begins at s_pairs, a lane
// adds sums number 2 (lane % 8) and the next; then sums are added by halves.
__device__ float factor_of_four(const uint32_t* s_pairs, int width, float eps) {
  s_pairs += threadIdx.x % 8;
  float even = 0, odd = 0;
#pragma unroll 8
  for (int k = 0; k < width / kLanes; ++k) {
    const uint32_t pair = s_pairs[k * kLanes / 2];
    const float a = low_bf16(pair), b = high_bf16(pair);
    even += a * a;
    odd += b * b;
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    even += __shfl_xor_sync(~0u, even, step);
    odd += __shfl_xor_sync(~0u, odd, step);
  }
  const float mean = (even + odd) / static_cast<float>(width);
  return 1 / sqrtf(mean + eps);
}

// A lane has channels [8 lane, 8 lane + 8) and those 256 behind them.
__global__ void __launch_bounds__(kBlock, 2) norm_many(const __grid_constant__ Job job) {
  constexpr int kPacks = kNormWidth / 8, kRowPacks = kPacks + 2;  // so that four vectors lie in banks of their own
  __shared__ uint4 s_rows[kWarps][kAtOnce * kRowPacks];
  __shared__ float s_turns[kMostRopeDim];
  const ManyVectors& all = job.all;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  const Share share = share_of_block(job);
  const uint4* from = static_cast<const uint4*>(all.x.data) + lane;
  uint4* to = static_cast<uint4*>(all.out.data) + lane;
  uint4 packs[kAtOnce][2];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t at = min(first + v, share.end - 1) * kPacks;
#pragma unroll
      for (int half = 0; half < 2; ++half) packs[v][half] = from[at + half * kWarp];
    }
  };
  int64_t first = share.begin + warp * kAtOnce;
  if (first < share.end) load(first);  // on their way while sines and cosines are worked out
  take_turns(all, share.row, s_turns);
  const Turns<8> turns(all, s_turns, kNormWidth / 2 + 8 * lane);
  for (; first < share.end; first += kWarps * kAtOnce) {
    __syncwarp();  // the last vectors have been read
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
#pragma unroll
      for (int half = 0; half < 2; ++half) s_rows[warp][v * kRowPacks + half * kWarp + lane] = packs[v][half];
    }
    __syncwarp();
    const float factor = factor_of_four(&s_rows[warp][lane / 8 * kRowPacks].x, kNormWidth, all.eps);
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      const float mine = __shfl_sync(~0u, factor, 8 * v);
      if (first + v >= share.end) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 pack = packs[v][half];
        const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
        float values[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[2 * i] = round_to(true, low_bf16(words[i]) * mine);
          values[2 * i + 1] = round_to(true, high_bf16(words[i]) * mine);
        }
        if (half == 1) turns.turn(values);
        to[(first + v) * kPacks + half * kWarp] =
            uint4{exact_pair(values[0], values[1]), exact_pair(values[2], values[3]), exact_pair(values[4], values[5]),
                  exact_pair(values[6], values[7])};
      }
    }
    if (first + kWarps * kAtOnce < share.end) load(first + kWarps * kAtOnce);
  }
}

// Rows of a multiple of 64 values, by weights or without. They lie in shared memory, in banks of their own as above.
constexpr int kRowWarps = 4, kMostRowWidth = 2048;
TESSERA_HOST_DEVICE constexpr int row_packs(int width) {
  return width / 8 + 2;
}
__global__ void __launch_bounds__(kRowWarps* kWarp) norm_rows(const __grid_constant__ NormRows job) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int packs = job.width / 8, stride = row_packs(job.width);
  uint4* s_rows = dynamic_shared<uint4>() + warp * kAtOnce * stride;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRowWarps + warp) * kAtOnce;
  const uint4* from = static_cast<const uint4*>(job.x.data);
  uint4* to = static_cast<uint4*>(job.out.data);
  wait_for_previous();
  if (first >= job.num_rows) return;
  for (int p = lane; p < packs; p += kWarp) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) loaded[v] = from[min(first + v, job.num_rows - 1) * packs + p];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) s_rows[v * stride + p] = loaded[v];
  }
  __syncwarp();
  const float factor = factor_of_four(&s_rows[lane / 8 * stride].x, job.width, job.eps);
  float factors[kAtOnce];
#pragma unroll
  for (int v = 0; v < kAtOnce; ++v) factors[v] = __shfl_sync(~0u, factor, 8 * v);
  for (int p = lane; p < packs; p += kWarp) {
    float weights[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i] = job.weight.data != nullptr ? job.weight[p * 8 + i] : 1.0f;
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      if (first + v >= job.num_rows) break;
      const uint4 pack = s_rows[v * stride + p];
      const auto normed = [&](uint32_t pair, int i) {
        return ptx::bf16_pair(low_bf16(pair) * factors[v] * weights[i], high_bf16(pair) * factors[v] * weights[i + 1]);
      };
      to[(first + v) * packs + p] = uint4{normed(pack.x, 0), normed(pack.y, 2), normed(pack.z, 4), normed(pack.w, 6)};
    }
  }
}

// A lane has channels [4 lane, 4 lane + 4). The sums and differences of a step are those of hadamard_row(): of lanes
// that lie `step` apart the lower has a + b and the upper a - b.
__device__ void transform(float (&values)[4], int lane) {
  const auto pair = [&](int i, int j) {
    const float a = values[i], b = values[j];
    values[i] = a + b, values[j] = a - b;
  };
  pair(0, 1), pair(2, 3), pair(0, 2), pair(1, 3);
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const bool is_upper = (lane & step) != 0;
#pragma unroll
    for (float& value : values) {
      const float other = __shfl_xor_sync(~0u, value, step);
      value = is_upper ? other - value : value + other;
    }
  }
}

__global__ void __launch_bounds__(kBlock, 4) hadamard_many(const __grid_constant__ Job job) {
  constexpr int kPacks = kHadamardWidth / 4;
  __shared__ float s_turns[kMostRopeDim];
  const ManyVectors& all = job.all;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  const Share share = share_of_block(job);
  take_turns(all, share.row, s_turns);
  const Turns<4> turns(all, s_turns, 4 * lane);
  const uint2* from = static_cast<const uint2*>(all.x.data) + lane;
  uint2* to = static_cast<uint2*>(all.out.data) + lane;
  for (int64_t first = share.begin + warp * kAtOnce; first < share.end; first += kWarps * kAtOnce) {
    uint2 packs[kAtOnce];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) packs[v] = from[min(first + v, share.end - 1) * kPacks];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      float values[4] = {low_bf16(packs[v].x), high_bf16(packs[v].x), low_bf16(packs[v].y), high_bf16(packs[v].y)};
      turns.turn(values);
      transform(values, lane);
#pragma unroll
      for (float& value : values) value = round_to(true, value * all.hadamard_scale);
      if (all.is_fp4) {
        static_assert(numeric::kMxfp4Block == 32);  // eight lanes
        float max = fabsf(values[0]);
#pragma unroll
        for (int i = 1; i < 4; ++i) max = larger_magnitude(max, fabsf(values[i]));
        const uint8_t scale = numeric::q4_scale(lanes_abs_max<8>(max));
#pragma unroll
        for (float& value : values) value = q4_rounded(value, scale);
      }
      if (first + v < share.end) {
        to[(first + v) * kPacks] = uint2{exact_pair(values[0], values[1]), exact_pair(values[2], values[3])};
      }
    }
  }
}

}  // namespace

bool run_many_vectors(const char* name, const ManyVectors& all, device::Queue& queue) {
  const bool is_bf16 = all.x.is_bf16 && all.out.is_bf16;
  const bool is_norm = all.has_norm && !all.has_hadamard && all.width == kNormWidth && all.rope_dim <= kMostRopeDim;
  const bool is_hadamard =
      !all.has_norm && all.has_hadamard && all.width == kHadamardWidth && all.rope_dim <= kHadamardWidth;
  if (!is_bf16 || (!is_norm && !is_hadamard) || all.rope_dim % 8 != 0) return false;
  if (all.num_rows * all.vectors < kFewest * multiprocessors()) return false;
  int block_vectors = kMostBlockVectors;
  if (all.num_rows * ceil_div(all.vectors, block_vectors) < 2 * multiprocessors()) block_vectors = kWarps * kAtOnce;
  const int groups = ceil_div(all.vectors, block_vectors);
  launch(name, queue, is_norm ? norm_many : hadamard_many, grid_for(all.num_rows * groups, 1), kBlock, 0,
         Job{all, block_vectors, groups});
  return true;
}

bool run_norm_rows(const char* name, const NormRows& job, device::Queue& queue) {
  const bool is_bf16 = job.x.is_bf16 && job.out.is_bf16;
  if (!is_bf16 || job.width % 64 != 0 || job.width > kMostRowWidth) return false;
  if (2 * job.num_rows < int64_t{kRowWarps} * kAtOnce * multiprocessors()) return false;  // a block to every other
  launch(name, queue, norm_rows, grid_for(job.num_rows, kRowWarps * kAtOnce), kRowWarps * kWarp,
         static_cast<size_t>(kRowWarps * kAtOnce * row_packs(job.width)) * sizeof(uint4), job);
  return true;
}

}  // namespace tessera::backends::cuda
