// SPDX-License-Identifier: Apache-2.0
#pragma once
// attention by mma.sync: 16 warps take 16 heads of a token, which share every key, and a part of at most 128 keys at a
// time (ops/attention: parts and their merging). Of the logits a warp has 8 keys, of the output 32 channels. Few tokens
// are spread over more thread blocks: each leaves its parts' results in the workspace, and a second kernel merges them.
// Either way a token's sums are the same.
// What bounds it: the instructions that 16 warps issue, four to a scheduler. So where few blocks are at work (compute
// capability 9.0 on) the 16 warps are a cluster of kBlocks blocks, on as many multiprocessors, which give each other
// their keys' logits; probabilities each block works out for itself.
#include "backends/cuda/attention_few_keys.cuh"
#include "backends/cuda/attention_few_values.cuh"
#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/ptx/prefetch.cuh"

namespace tessera::backends::cuda::attention_few {

// What values need of a part's keys beside them: scales of a thread's key, loaded first, for all warps.
template <ops::EntryFormat kFormat, int kBlocks>
__device__ void share_scales(const Job& job, Shared& shared, const KeyScales& scales) {
  const KeyLayout<kFormat, kBlocks> layout{job};
  if (layout.fp8_groups() == 0 || threadIdx.x >= kPart) return;
  const bool is_unusual = __any_sync(~0u, !scales.are_usual(layout.fp8_groups()));
  if (threadIdx.x % 32 == 0) shared.has_unusual_scale[threadIdx.x / 32] = is_unusual;
  constexpr int kOwnGroups = kWarpChannels * Place<kBlocks>::kOwnWarps / kGroup;
  const int first = kBlocks == 1 ? 0 : ptx::cluster_rank() * kOwnGroups;
#pragma unroll
  for (int i = 0; i < kOwnGroups; ++i) shared.scales[first + i][threadIdx.x] = static_cast<uint16_t>(scales[first + i]);
}

// Grid: tokens' clusters by groups of 16 heads by clusters over which a token's parts are dealt out.
template <ops::EntryFormat kFormat, int kBlocks>
__global__ void __launch_bounds__(Place<kBlocks>::kThreads) attention_parts(Job job) {
  using Place = attention_few::Place<kBlocks>;
  Shared& shared = *dynamic_shared<Shared>();
  const KeyLayout<kFormat, kBlocks> layout{job};
  const int64_t t = blockIdx.x / kBlocks;
  const TokenKeys token(job, t);
  const Keys& keys = token.keys;
  const int first_head = static_cast<int>(blockIdx.y) * kHeads, lane = static_cast<int>(threadIdx.x) % 32;
  const int own_warp = static_cast<int>(threadIdx.x) / 32, warp = Place::warp();
  const int channel = warp * kWarpChannels + lane % 4 * kHeld;
  const int first_part = static_cast<int>(blockIdx.z);
  const bool is_spread = keys.num_parts <= job.slots;
  const int stride = is_spread ? static_cast<int>(gridDim.z) : 1;
  // Those of the first part stay, so that what comes next waits for what came before.
  if (first_part > 0 && (!is_spread || first_part >= keys.num_parts)) return;
  // This thread's key, of which it tells the others, and the one of which it has channels.
  const uint8_t *key = nullptr, *own_key = nullptr;
  const auto find = [&](int part) {
    if (threadIdx.x < kPart) key = token.find(job, t, part, static_cast<int>(threadIdx.x), layout.bytes());
    own_key = token.find(job, t, part, kWarpKeys * warp + lane / 4, layout.bytes());
  };
  const bool is_known = token.is_known(job, first_part);
  if (is_known) {
    find(first_part);
    // Nothing is read that the kernel before may write. A cluster's blocks ask for a quarter each, and nobody for what
    // another GPU has.
    const bool is_own = kBlocks == 1 || static_cast<int>(threadIdx.x) % kBlocks == ptx::cluster_rank();
    const bool is_near = keys.is_window(first_part) || !job.entry_cache.has_far;
    if (key != nullptr && is_own && is_near) ptx::prefetch_range(key, layout.bytes());
  }
  // Of the queries. Heads that aren't there are the last one again.
  const uint16_t* queries = job.q + (t * job.heads + first_head) * layout.width();
  const int last_head = job.heads - 1 - first_head, row_words = layout.width() / 8;
  if constexpr (kBlocks > 1) Place::meet();  // all are there to be written to
  wait_for_previous();
  if (keys.num_parts == 0) return;
  // Queries are on their way while keys are.
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * row_words; i += Place::kThreads) {
    const int row = i / row_words, column = i % row_words * 8;
    ptx::copy_async<16>(&shared.q[row][column], queries + min(row, last_head) * layout.width() + column);
  }
  ptx::commit_copies();
  if (!is_known) find(first_part);
  float2 state[2] = {{-__builtin_huge_valf(), 0}, {-__builtin_huge_valf(), 0}};
  float output[kChannels][4] = {};
  for (int part = first_part; part < keys.num_parts; part += stride) {
    const int count = keys.count_of(part);
    KeyRow<kFormat, kBlocks> own_row(job, own_key);
    const bool has_keys = kWarpKeys * warp < count;
    if (has_keys) own_row.load(0);
    KeyScales scales;
    if (layout.fp8_groups() > 0 && threadIdx.x < kPart) scales.load(layout.scales(key));
    if (threadIdx.x < kPart) shared.keys[threadIdx.x / 2].at[threadIdx.x % 2] = key;
    ptx::wait_for_copies<0>();
    __syncthreads();
    find(part + stride);  // on its way too
    // On their way while logits are worked out, where there are registers for both.
    Values<kFormat, kBlocks> values(job, shared, warp);
    if constexpr (kBlocks > 1) values.load();
    if (has_keys) multiply_keys(job, shared, own_row);
    if constexpr (kBlocks == 1) values.load();
    share_scales<kFormat, kBlocks>(job, shared, scales);
    Place::meet();
    soften<Place::kOwnWarps>(shared, own_warp, count);
    __syncthreads();
    float sums[kChannels][4] = {};
    values.multiply(count, sums);
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
