// SPDX-License-Identifier: Apache-2.0
// attention on tensor cores: a thread block takes 16 heads of a token, which share every key, and a part of at most 128
// keys at a time (ops/attention: parts and their merging). Few tokens are spread over more blocks: each leaves its
// parts' results in the workspace, and a second kernel merges them. Either way a token's sums are the same.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kHeads = 16, kWarps = 16, kBlock = 32 * kWarps;
constexpr int kPart = static_cast<int>(ops::kAttentionPart), kGroup = static_cast<int>(ops::kKvGroup);
constexpr int kMaxWidth = static_cast<int>(ops::kMaxHeadDim);
constexpr int kWarpKeys = 8, kWarpChannels = 32;
static_assert(kPart == kWarpKeys * kWarps && kMaxWidth == kWarpChannels * kWarps);
// Tokens that are spread, blocks over which one is, and parts of all of them that the workspace holds: a million
// tokens, 128 to an entry, are 65.
constexpr int kSplitTokens = 8, kSplits = 16, kSlots = 72;

using Job = AttentionJob;
using Keys = AttentionKeys;

struct Shared {
  // Rows are padded so that the lanes of a warp meet different banks.
  uint16_t q[kHeads][kMaxWidth + 8];
  float logits[kHeads][kPart + 4];
  uint16_t probabilities[kHeads][kPart + 8];
  const uint8_t* keys[kPart];
  float max[kHeads], sum[kHeads];
};

// The addresses of a part's keys; their number. All threads.
__device__ int find_keys(const Job& job, Shared& shared, const Keys& keys, int64_t t, int part) {
  const int count = keys.count_of(part), n = static_cast<int>(threadIdx.x);
  if (n < count) shared.keys[n] = keys.key_at(job, t, part, keys.index_of(job, t, part, n));
  __syncthreads();
  return count;
}

// shared.logits of 8 keys by each warp. Lane (g, t) multiplies channels [16 t, 16 t + 16) of each group of 64, of heads
// g and g + 8 and key g.
template <ops::EntryFormat kFormat>
__device__ void multiply_keys(const Job& job, Shared& shared, int count) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, first_key = kWarpKeys * warp;
  if (first_key >= count) return;
  const uint8_t* key = shared.keys[min(first_key + g, count - 1)];
  float sums[4] = {};
  constexpr int kAtOnce = 4;  // groups that are loaded before the first is used
  for (int begin = 16 * t; begin < job.width; begin += kAtOnce * kGroup) {
    KeyPiece<16> pieces[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (begin + n * kGroup < job.width) pieces[n].load<kFormat>(job.entries, key, begin + n * kGroup);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int channel = begin + n * kGroup;
      if (channel >= job.width) break;
      uint32_t pairs[8];
      channel_pairs(pieces[n], kFormat == ops::EntryFormat::kKvFp8Bf16 && channel < job.entries.nope, pairs);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 low = *reinterpret_cast<const uint4*>(&shared.q[g][channel + 8 * i]);
        const uint4 high = *reinterpret_cast<const uint4*>(&shared.q[g + 8][channel + 8 * i]);
        ptx::mma_bf16(sums, low.x, high.x, low.y, high.y, pairs[4 * i], pairs[4 * i + 1]);
        ptx::mma_bf16(sums, low.z, high.z, low.w, high.w, pairs[4 * i + 2], pairs[4 * i + 3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) shared.logits[g + i / 2 * 8][first_key + 2 * t + i % 2] = sums[i] * job.scale;
}

// Probabilities, maximum and sum of each head, a warp's: those of sm90/attention.cu, bit for bit. Lane (half, t,
// quarter) has keys 64 half + 16 quarter + 8 (i / 2) + 2 t + i % 2, as the sum wants them.
__device__ void soften(Shared& shared, int count) {
  const int head = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_key = lane / 16 * 64 + lane % 4 * 16 + lane / 4 % 4 * 2;
  float p[4], max = -__builtin_huge_valf();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = first_key + i / 2 * 8 + i % 2;
    p[i] = n < count ? shared.logits[head][n] : -__builtin_huge_valf();
    max = fmaxf(max, p[i]);  // a NaN shows in the sum
  }
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  const float base = probability_base(max);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    p[i] = probability(p[i], base);
    sum += p[i];
    shared.probabilities[head][first_key + i / 2 * 8 + i % 2] = numeric::bf16_from_float(p[i]);
  }
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) shared.max[head] = sum != sum ? sum : max, shared.sum[head] = sum;
}

// Values of a part on their way: a lane's 4 channels of 4 keys of each 16.
constexpr int kChannels = 4, kSteps = kPart / 16;
using Values16 = KeyPiece<kChannels>[4];

template <ops::EntryFormat kFormat>
__device__ void load_values(const Job& job, const Shared& shared, int count, int step, Values16& pieces) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int channel = kWarpChannels * warp + kChannels * (lane / 4);
  if (channel >= job.width) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = 16 * step + i / 2 * 8 + lane % 4 * 2 + i % 2;
    pieces[i].template load<kFormat>(job.entries, shared.keys[min(n, count - 1)], channel);
  }
}

// sums[j] += probabilities times channels 32 warp + 4 c + j of 16 keys, c a column of the product.
template <ops::EntryFormat kFormat>
__device__ void multiply_values(const Job& job, const Shared& shared, int step, const Values16& pieces,
                                float (&sums)[kChannels][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, channel = kWarpChannels * warp + kChannels * g;
  if (kWarpChannels * warp >= job.width) return;
  const bool is_fp8 = kFormat == ops::EntryFormat::kKvFp8Bf16 && channel < job.entries.nope;
  const uint16_t* low = &shared.probabilities[g][16 * step + 2 * t];
  const uint16_t* high = &shared.probabilities[g + 8][16 * step + 2 * t];
  const auto pair_at = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
  uint32_t a[4] = {pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)};
  if (is_fp8) {  // probabilities take the values' scales: exact, they are powers of two
    const PairScale near = pair_scale(pieces[0].scale, pieces[1].scale);
    const PairScale far = pair_scale(pieces[2].scale, pieces[3].scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const PairScale& scale = i < 2 ? near : far;
      a[i] = ptx::multiply_bf16x2(a[i], scale.first);
      if (scale.second != kOnePair) a[i] = ptx::multiply_bf16x2(a[i], scale.second);
    }
  }
  uint32_t first[kChannels], second[kChannels];
  key_pairs(pieces[0], pieces[1], is_fp8, first);
  key_pairs(pieces[2], pieces[3], is_fp8, second);
#pragma unroll
  for (int j = 0; j < kChannels; ++j) ptx::mma_bf16(sums[j], a[0], a[1], a[2], a[3], first[j], second[j]);
}

// What a lane holds of head g + 8 r: 8 channels from 32 warp + 8 t on, in order.
constexpr int kHeld = 2 * kChannels;
__device__ float& output_of(float (&sums)[kChannels][4], int r, int i) {
  return sums[i % kChannels][2 * r + i / kChannels];
}

// Grid: tokens by groups of 16 heads by blocks over which a token's parts are dealt out.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kBlock) attention_parts(Job job) {
  __shared__ __align__(16) Shared shared;
  wait_for_previous();
  const int64_t t = blockIdx.x;
  const int first_head = static_cast<int>(blockIdx.y) * kHeads, lane = static_cast<int>(threadIdx.x) % 32;
  const int channel = static_cast<int>(threadIdx.x) / 32 * kWarpChannels + lane % 4 * kHeld;
  const Keys keys = Keys::of_token(job, t);
  const bool is_spread = keys.num_parts <= job.slots;
  const int stride = is_spread ? static_cast<int>(gridDim.z) : 1;
  if (static_cast<int>(blockIdx.z) >= (is_spread ? keys.num_parts : 1)) return;
  // Heads that aren't there are the last one again.
  const int words = job.width / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * words; i += kBlock) {
    const int64_t row = t * job.heads + min(first_head + i / words, job.heads - 1);
    *reinterpret_cast<uint4*>(&shared.q[i / words][i % words * 8]) =
        __ldg(reinterpret_cast<const uint4*>(job.q + row * job.width) + i % words);
  }
  float2 state[2] = {{-__builtin_huge_valf(), 0}, {-__builtin_huge_valf(), 0}};
  float output[kChannels][4] = {};
  for (int part = static_cast<int>(blockIdx.z); part < keys.num_parts; part += stride) {
    const int count = find_keys(job, shared, keys, t, part);
    multiply_keys<kFormat>(job, shared, count);
    constexpr int kAhead = 2;  // steps whose values are on their way while probabilities are worked out
    Values16 values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_values<kFormat>(job, shared, count, n, values[n]);
    __syncthreads();
    soften(shared, count);
    __syncthreads();
    float sums[kChannels][4] = {};
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      if (16 * n >= count) break;
      multiply_values<kFormat>(job, shared, n, values[n % kAhead], sums);
      if (n + kAhead < kSteps) load_values<kFormat>(job, shared, count, n + kAhead, values[n % kAhead]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = lane / 4 + 8 * r, head = first_head + at;
      if (is_spread) {
        if (head >= job.heads) continue;
        const int64_t slot = (t * job.slots + part) * job.heads + head;
        if (threadIdx.x % 4 == 0 && threadIdx.x < 32) job.states[slot] = {shared.max[at], shared.sum[at]};
        if (channel >= job.width) continue;
        float4* row = reinterpret_cast<float4*>(job.outputs + slot * job.width + channel);
#pragma unroll
        for (int i = 0; i < kHeld; i += 4) {
          row[i / 4] = {output_of(sums, r, i), output_of(sums, r, i + 1), output_of(sums, r, i + 2),
                        output_of(sums, r, i + 3)};
        }
      } else {
        const float2 factors = merge_factors(state[r], {shared.max[at], shared.sum[at]});
        if (factors.x < 0) continue;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          float& total = output_of(output, r, i);
          total = total * factors.x + output_of(sums, r, i) * factors.y;
        }
      }
    }
    __syncthreads();  // the next part overwrites what this one read
  }
  if (is_spread) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + lane / 4 + 8 * r;
    if (head >= job.heads || channel >= job.width) continue;
    const float factor = last_factor(state[r], job.sink[head]);
    uint16_t* row = job.out + (t * job.heads + head) * job.width + channel;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) row[i] = numeric::bf16_from_float(output_of(output, r, i) * factor);
  }
}

}  // namespace

bool attention_mma_supports(const ops::Attention::Desc& desc, std::string& why_not) {
  const ops::EntryLayout& layout = desc.layout;
  if (desc.activation != DType::kBF16 ||
      (layout.format != ops::EntryFormat::kBf16 && layout.format != ops::EntryFormat::kKvFp8Bf16)) {
    why_not = "needs BF16 queries and keys in FP8 or BF16";
  } else if (desc.head_dim > kMaxWidth || desc.head_dim % kGroup != 0 || layout.rope_dim % kGroup != 0) {
    why_not = "needs a head dimension of at most 512 and a rotary part that are multiples of 64";
  } else {
    return true;
  }
  return false;
}

int64_t attention_mma_workspace(const ops::Attention::Desc& desc, int64_t) {
  return attention_parts_workspace(desc, kSlots);
}

void attention_mma(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const bool is_spread = args.num_tokens <= kSplitTokens;
  const Job job = attention_job(desc, args, is_spread ? kSlots : 0);
  const dim3 grid(static_cast<unsigned>(args.num_tokens), ceil_div<unsigned>(static_cast<unsigned>(desc.heads), kHeads),
                  is_spread ? kSplits : 1);
  const bool is_fp8 = desc.layout.format == ops::EntryFormat::kKvFp8Bf16;
  launch("attention_parts", queue,
         is_fp8 ? attention_parts<ops::EntryFormat::kKvFp8Bf16> : attention_parts<ops::EntryFormat::kBf16>, grid,
         kBlock, 0, job);
  if (is_spread) launch_attention_merge<kSlots>(queue, job);
}

}  // namespace tessera::backends::cuda
