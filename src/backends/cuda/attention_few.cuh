// SPDX-License-Identifier: Apache-2.0
#pragma once
// attention by mma.sync: 16 warps take 16 heads of a token, which share every key, and a part of at most 128 keys at a
// time (ops/attention: parts and their merging). Of the logits a warp has 8 keys, of the output 32 channels. Few tokens
// are spread over more thread blocks: each leaves its parts' results in the workspace, and a second kernel merges them.
// Either way a token's sums are the same.
// What bounds it: the instructions that 16 warps issue, four to a scheduler. So where few blocks are at work (compute
// capability 9.0 on) the 16 warps are a cluster of kBlocks blocks, on as many multiprocessors, which give each other
// their keys' logits; probabilities each block works out for itself.
#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"

namespace tessera::backends::cuda::attention_few {

using namespace cuda_common;

constexpr int kHeads = 16, kWarps = 16;
constexpr int kPart = static_cast<int>(ops::kAttentionPart), kGroup = static_cast<int>(ops::kKvGroup);
constexpr int kMaxWidth = static_cast<int>(ops::kMaxHeadDim);
constexpr int kWarpKeys = 8, kWarpChannels = 32;
static_assert(kPart == kWarpKeys * kWarps && kMaxWidth == kWarpChannels * kWarps);

using Job = AttentionJob;
using Keys = AttentionKeys;

// Its warps; kBlocks: thread blocks, which are a cluster if they are several. All are in dynamic shared memory.
template <int kBlocks>
struct Place {
  static constexpr int kOwnWarps = kWarps / kBlocks, kThreads = 32 * kOwnWarps;
  static_assert(kThreads >= kPart && kWarps % kBlocks == 0);
  // Of all 16.
  __device__ static int warp() {
    const int own = static_cast<int>(threadIdx.x) / 32;
    if constexpr (kBlocks == 1) return own;
    return ptx::cluster_rank() * kOwnWarps + own;
  }
  // By all of them; what was written to shared memory before is seen behind it.
  __device__ static void meet() {
    if constexpr (kBlocks == 1) {
      __syncthreads();
    } else {
      ptx::sync_cluster();
    }
  }
};

struct Shared {
  // Rows are padded so that the lanes of a warp meet different banks.
  uint16_t q[kHeads][kMaxWidth + 8];
  float logits[kHeads][kPart + 4];
  uint16_t probabilities[kHeads][kPart + 8];
  const uint8_t* keys[kPart];
  float max[kHeads], sum[kHeads];
};

// Where a token's keys lie. Positions, numbers, places and rings are a step's inputs, which no kernel makes, and so is
// where keys of the window lie. What entries are attended a kernel may choose, and one may make the table of their
// pages (comm/near_pages.h).
struct TokenKeys {
  Keys keys;
  const uint8_t* window;
  ops::SequenceEntries<const uint8_t> entries;

  __device__ TokenKeys(const Job& job, int64_t t) : keys(Keys::of_token(job, t)), window(job.window_cache.of_row(t)) {
    if (job.entry_cache.exists()) entries = job.entry_cache.of_row(t);
  }
  // This thread's key of a part.
  __device__ const uint8_t* find(const Job& job, int64_t t, int part) const {
    const int n = static_cast<int>(threadIdx.x);
    if (part >= keys.num_parts || n >= keys.count_of(part)) return nullptr;
    const int index = keys.index_of(job, t, part, n);
    return keys.is_window(part) ? window + index * job.entries.bytes : entries.at(index, job.entries.bytes);
  }
};

// shared.logits of 8 keys by each warp, for all blocks. Lane (g, t) multiplies channels [16 t, 16 t + 16) of each group
// of 64, of heads g and g + 8 and key g.
template <ops::EntryFormat kFormat, int kBlocks>
__device__ void multiply_keys(const Job& job, Shared& shared, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, first_key = kWarpKeys * Place<kBlocks>::warp();
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
  for (int rank = 0; rank < kBlocks; ++rank) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2* at = reinterpret_cast<float2*>(&shared.logits[g + 8 * r][first_key + 2 * t]);
      if constexpr (kBlocks > 1) at = ptx::in_block(at, rank);
      *at = {sums[2 * r] * job.scale, sums[2 * r + 1] * job.scale};
    }
  }
}

// Probabilities, maximum and sum of a head, by a warp: those of sm90/attention.cu, bit for bit. Lane (half, t,
// quarter) has keys 64 half + 16 quarter + 8 (i / 2) + 2 t + i % 2, as the sum wants them.
__device__ inline void soften(Shared& shared, int head, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
__device__ void load_values(const Job& job, const Shared& shared, int warp, int count, int step, Values16& pieces) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
__device__ void multiply_values(const Job& job, const Shared& shared, int warp, int step, const Values16& pieces,
                                float (&sums)[kChannels][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, channel = kWarpChannels * warp + kChannels * g;
  if (kWarpChannels * warp >= job.width) return;
  const bool is_fp8 = kFormat == ops::EntryFormat::kKvFp8Bf16 && channel < job.entries.nope;
  const uint16_t* low = &shared.probabilities[g][16 * step + 2 * t];
  const uint16_t* high = &shared.probabilities[g + 8][16 * step + 2 * t];
  const auto pair_at = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
  uint32_t a[4] = {pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)};
  if (is_fp8) {
    const uint32_t near = pieces[0].scale | pieces[1].scale << 16, far = pieces[2].scale | pieces[3].scale << 16;
    if (__any_sync(~0u, !are_usual_scales(near, far))) [[unlikely]] {
      // Values take their scales: a probability times a great one may be infinite where the product is not.
      const PairScale near_scale = pair_scale(pieces[0].scale, pieces[1].scale);
      const PairScale far_scale = pair_scale(pieces[2].scale, pieces[3].scale);
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        ptx::mma_bf16(sums[j], a[0], a[1], a[2], a[3], scaled_key_pair(pieces[0], pieces[1], j, near_scale),
                      scaled_key_pair(pieces[2], pieces[3], j, far_scale));
      }
      return;
    }
    // Probabilities take the scales, which are fewer: exact, they are powers of two.
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::multiply_bf16x2(a[i], usual_pair_scale(i < 2 ? near : far));
  }
  uint32_t first[kChannels], second[kChannels];
  key_pairs(pieces[0], pieces[1], is_fp8, first);
  key_pairs(pieces[2], pieces[3], is_fp8, second);
#pragma unroll
  for (int j = 0; j < kChannels; ++j) ptx::mma_bf16(sums[j], a[0], a[1], a[2], a[3], first[j], second[j]);
}

// What a lane holds of head g + 8 r: 8 channels from 32 warp + 8 t on, in order.
constexpr int kHeld = 2 * kChannels;
__device__ inline float& output_of(float (&sums)[kChannels][4], int r, int i) {
  return sums[i % kChannels][2 * r + i / kChannels];
}

// Grid: tokens' clusters by groups of 16 heads by clusters over which a token's parts are dealt out.
template <ops::EntryFormat kFormat, int kBlocks>
__global__ void __launch_bounds__(Place<kBlocks>::kThreads) attention_parts(Job job) {
  using Place = attention_few::Place<kBlocks>;
  Shared& shared = *dynamic_shared<Shared>();
  const int64_t t = blockIdx.x / kBlocks;
  const TokenKeys token(job, t);
  const Keys& keys = token.keys;
  const int first_part = static_cast<int>(blockIdx.z);
  const bool is_window = keys.is_window(first_part);
  const uint8_t* key = is_window ? token.find(job, t, first_part) : nullptr;
  if constexpr (kBlocks > 1) Place::meet();  // all are there to be written to
  wait_for_previous();
  const int first_head = static_cast<int>(blockIdx.y) * kHeads, lane = static_cast<int>(threadIdx.x) % 32;
  const int own_warp = static_cast<int>(threadIdx.x) / 32, warp = Place::warp();
  const int channel = warp * kWarpChannels + lane % 4 * kHeld;
  const bool is_spread = keys.num_parts <= job.slots;
  const int stride = is_spread ? static_cast<int>(gridDim.z) : 1;
  if (first_part >= (is_spread ? keys.num_parts : 1)) return;
  // Queries are on their way while the first keys are found. Heads that aren't there are the last one again.
  constexpr int kRowWords = kMaxWidth / 8, kWords = kHeads * kRowWords / Place::kThreads;
  uint4 words[kWords];
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * Place::kThreads;
    if (i % kRowWords * 8 >= job.width) continue;
    const int64_t row = t * job.heads + min(first_head + i / kRowWords, job.heads - 1);
    words[n] = __ldg(reinterpret_cast<const uint4*>(job.q + row * job.width) + i % kRowWords);
  }
  if (!is_window) key = token.find(job, t, first_part);
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * Place::kThreads;
    if (i % kRowWords * 8 < job.width)
      *reinterpret_cast<uint4*>(&shared.q[i / kRowWords][i % kRowWords * 8]) = words[n];
  }
  float2 state[2] = {{-__builtin_huge_valf(), 0}, {-__builtin_huge_valf(), 0}};
  float output[kChannels][4] = {};
  for (int part = first_part; part < keys.num_parts; part += stride) {
    const int count = keys.count_of(part);
    if (threadIdx.x < kPart) shared.keys[threadIdx.x] = key;
    __syncthreads();
    key = token.find(job, t, part + stride);  // on its way too
    multiply_keys<kFormat, kBlocks>(job, shared, count);
    // Steps whose values are on their way while probabilities are worked out: fewer warps have more registers.
    constexpr int kAhead = kBlocks == 1 ? 2 : 4;
    Values16 values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_values<kFormat>(job, shared, warp, count, n, values[n]);
    Place::meet();
#pragma unroll
    for (int head = 0; head < kHeads; head += Place::kOwnWarps) soften(shared, head + own_warp, count);
    __syncthreads();
    float sums[kChannels][4] = {};
    // Not all unrolled: instructions that have not run lately seem to be waited for, and half as many take less time
    // (docs/performance/hopper.md, "A step kernel by kernel").
#pragma unroll 1
    for (int first = 0; first < kSteps && 16 * first < count; first += kAhead) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (16 * (first + n) >= count) break;
        multiply_values<kFormat>(job, shared, warp, first + n, values[n], sums);
        const int later = first + n + kAhead;
        if (later < kSteps) load_values<kFormat>(job, shared, warp, count, later, values[n]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = lane / 4 + 8 * r, head = first_head + at;
      if (is_spread) {
        if (head >= job.heads) continue;
        const int64_t slot = (t * job.slots + part) * job.heads + head;
        if (lane % 4 == 0 && warp == 0) job.states[slot] = {shared.max[at], shared.sum[at]};
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
    if (part + stride < keys.num_parts) Place::meet();  // the next part overwrites what this one read
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

// A token's parts are dealt out to `splits` clusters, 1: to one, which merges them itself. kSlots: parts of all tokens
// that the workspace holds. Whether `out` has been rotated, which merging does.
template <int kBlocks, int kSlots>
bool run(const ops::Attention::Desc& desc, const ops::Attention::Args& args, int64_t splits,
         const OutRotation& rotation, device::Queue& queue) {
  const Job job = attention_job(desc, args, splits > 1 ? kSlots : 0);
  const dim3 grid(static_cast<unsigned>(args.num_tokens * kBlocks),
                  static_cast<unsigned>(ceil_div<int64_t>(desc.heads, kHeads)), static_cast<unsigned>(splits));
  const auto kernel = desc.layout.format == ops::EntryFormat::kKvFp8Bf16
                          ? attention_parts<ops::EntryFormat::kKvFp8Bf16, kBlocks>
                          : attention_parts<ops::EntryFormat::kBf16, kBlocks>;
  launch_clusters("attention_parts", queue, kernel, grid, Place<kBlocks>::kThreads, sizeof(Shared), kBlocks, job);
  if (splits > 1) launch_attention_merge<kSlots>(queue, job, rotation);
  return splits > 1;
}

}  // namespace tessera::backends::cuda::attention_few
