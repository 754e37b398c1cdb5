// SPDX-License-Identifier: Apache-2.0
#pragma once
// What attention's kernels share: a call's arguments, a token's keys in parts of at most kAttentionPart
// (ops/attention), and how parts' results become one. Few tokens are spread over thread blocks by parts: each part's
// result goes to the workspace, and merge_attention_parts adds them up in order, as a block does that has all parts.
#include <cstdint>

#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/out_rotation.h"
#include "backends/cuda_common/row_parts.cuh"
#include "ops/attention/attention.h"

namespace tessera::backends::cuda_common {

struct AttentionJob {
  const uint16_t* q;
  const int64_t* positions;
  ops::SequenceBases<const uint8_t> window_cache;
  int64_t window, window_slots;
  ops::PagedEntries<const uint8_t> entry_cache;
  const int32_t *num_entries, *selected;
  int64_t selected_stride;
  const float* sink;
  uint16_t* out;
  Entries entries;
  int heads, width;
  float scale;
  float2* states;  // [tokens, slots, heads] maximum and sum of a part
  float* outputs;  // [tokens, slots, heads, width] its unnormalised output
  int slots;       // parts of a token that the workspace holds; of a token with more, nothing is spread
  int64_t num_tokens;
};

// Bytes for the results of that many parts.
inline int64_t attention_parts_workspace(const ops::Attention::Desc& desc, int64_t parts) {
  return parts * desc.heads *
         (desc.head_dim * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(float2)));
}

// `parts` are what the workspace holds, of all tokens; 0: nothing is spread.
inline AttentionJob attention_job(const ops::Attention::Desc& desc, const ops::Attention::Args& args, int64_t parts) {
  float* outputs = static_cast<float*>(args.workspace);
  return {static_cast<const uint16_t*>(args.q.data),
          args.positions,
          args.window_cache,
          desc.window,
          args.window_slots,
          args.entry_cache,
          args.num_entries,
          args.selected,
          args.selected_stride,
          args.sink,
          static_cast<uint16_t*>(args.out.data),
          entries_of(desc.layout),
          static_cast<int>(desc.heads),
          static_cast<int>(desc.head_dim),
          desc.scale,
          reinterpret_cast<float2*>(outputs + parts * desc.heads * desc.head_dim),
          outputs,
          static_cast<int>(parts / args.num_tokens),
          args.num_tokens};
}

// A token's keys.
struct AttentionKeys {
  static constexpr int kPart = static_cast<int>(ops::kAttentionPart);
  int window_begin, num_window, num_entries;
  int window_parts, num_parts;

  __device__ static AttentionKeys of(const AttentionJob& job, int64_t position, int num_entries) {
    AttentionKeys keys;
    keys.window_begin = static_cast<int>(max(int64_t{0}, position - job.window + 1));
    keys.num_window = static_cast<int>(position) + 1 - keys.window_begin;
    keys.num_entries = num_entries;
    keys.window_parts = (keys.num_window + kPart - 1) / kPart;
    keys.num_parts = keys.window_parts + (keys.num_entries + kPart - 1) / kPart;
    return keys;
  }
  __device__ static AttentionKeys of_token(const AttentionJob& job, int64_t t) {
    return of(job, job.positions[t], job.entry_cache.exists() ? job.num_entries[t] : 0);
  }

  __device__ bool is_window(int part) const { return part < window_parts; }
  // The rank of a part's first key, in the window or in the list of entries.
  __device__ int first_of(int part) const { return (is_window(part) ? part : part - window_parts) * kPart; }
  __device__ int count_of(int part) const {
    return min(kPart, (is_window(part) ? num_window : num_entries) - first_of(part));
  }
  // Key n of a part: its slot in the ring or its index among the entries.
  __device__ int index_of(const AttentionJob& job, int64_t t, int part, int n) const {
    const int rank = first_of(part) + n;
    if (is_window(part)) return (window_begin + rank) % static_cast<int>(job.window_slots);
    return job.selected == nullptr ? rank : job.selected[t * job.selected_stride + rank];
  }
};

// A part's probability of a logit, not yet divided by the sum. base: of the part's maximum, which may be -inf.
__device__ inline float probability_base(float max) {
  return max == -__builtin_huge_valf() ? 0.0f : max;
}
__device__ inline float probability(float logit, float base) {
  constexpr float kLog2E = 1.4426950408889634f;
  return exp2f((logit - base) * kLog2E);
}

// Folds a part's maximum and sum into the total's; outputs are to be multiplied by what it returns, the total's by x
// and the part's by y. Negative: the part is empty and changes nothing.
__device__ inline float2 merge_factors(float2& total, float2 part) {
  const float max = part.x != part.x || part.x > total.x ? part.x : total.x;
  if (max == -__builtin_huge_valf()) return {-1, -1};  // exp(-inf - -inf) would be NaN
  const float keep = expf(total.x - max), add = expf(part.x - max);
  total = {max, total.y * keep + part.y * add};
  return {keep, add};
}

// What the sum of all parts is multiplied by: folds the sink in, a term without a value, and divides.
__device__ inline float last_factor(float2& total, float sink) {
  const float keep = merge_factors(total, {sink, 1}).x;
  return (keep < 0 ? 1.0f : keep) / total.y;
}

constexpr int kMergeThreads = static_cast<int>(ops::kMaxHeadDim) / 4;  // each has four channels

// The factors of merge_factors, of all parts at once, by a warp: what it goes through part by part is the maximum so
// far, which a scan finds. factors[part] and sums[part], a part's own sum, are of `num_parts` parts; returns the
// maximum.
template <class StateOf>
__device__ float all_merge_factors(const StateOf& state_of, int num_parts, float2* factors, float* sums) {
  constexpr unsigned kAll = ~0u;
  constexpr int kLanes = 32;
  constexpr float kNone = -__builtin_huge_valf();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto later_max = [](float so_far, float next) { return next != next || next > so_far ? next : so_far; };
  float before = kNone;
  for (int first = 0; first < num_parts; first += kLanes) {
    const int part = first + lane;
    const float2 state = part < num_parts ? state_of(part) : float2{kNone, 0};
    float max = state.x;
    for (int step = 1; step < kLanes; step *= 2) {
      const float lower = __shfl_up_sync(kAll, max, step);
      if (lane >= step) max = later_max(lower, max);
    }
    max = later_max(before, max);
    const float lower = __shfl_up_sync(kAll, max, 1), last = lane == 0 ? before : lower;
    if (part < num_parts) {
      factors[part] = max == kNone ? float2{-1, -1} : float2{expf(last - max), expf(state.x - max)};
      sums[part] = state.y;
    }
    before = __shfl_sync(kAll, max, kLanes - 1);
  }
  return before;
}

// A thread's four channels of a head's output, in pairs; the values are rounded to BF16 before and after, as by rope.
class ChannelTurns {
 public:
  // Positions and frequencies are made by no kernel: before the kernel before has ended.
  __device__ ChannelTurns(const AttentionJob& job, const OutRotation& rotation, int64_t t, int channel)
      : is_turned_(channel < job.width && channel >= job.width - rotation.dim) {
    if (!is_turned_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = (channel - job.width + rotation.dim) / 2 + i;
      const double angle = rotary_angle(job.positions[t], rotation.frequencies[pair]);
      cosines_[i] = rotary_cosine(angle), sines_[i] = rotary_sine(angle, true);
    }
  }
  __device__ void turn(uint16_t (&values)[4]) const {
    if (!is_turned_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = numeric::bf16_to_float(values[2 * i]), b = numeric::bf16_to_float(values[2 * i + 1]);
      values[2 * i] = numeric::bf16_from_float(rotated_first(a, b, cosines_[i], sines_[i]));
      values[2 * i + 1] = numeric::bf16_from_float(rotated_second(a, b, cosines_[i], sines_[i]));
    }
  }

 private:
  const bool is_turned_;
  float cosines_[2] = {}, sines_[2] = {};
};

// Grid: tokens by heads. kSlots: at least the job's. Bound by the latency of loads: a thread has kAtOnce on their way.
template <int kSlots, bool kRotates>
__global__ void __launch_bounds__(kMergeThreads) merge_attention_parts(AttentionJob job, OutRotation rotation) {
  constexpr int kAtOnce = 16;
  __shared__ float2 s_factors[kSlots];
  __shared__ float s_sums[kSlots], s_max;
  const int64_t t = blockIdx.x, head = blockIdx.y;
  const int channel = static_cast<int>(threadIdx.x) * 4;
  const ChannelTurns turns(job, kRotates ? rotation : OutRotation{}, t, channel);
  const int num_parts = AttentionKeys::of_token(job, t).num_parts;
  const float sink = job.sink[head];
  wait_for_previous();
  uint16_t* const row = job.out + (t * job.heads + head) * job.width + channel;
  uint16_t out[4];
  if (num_parts > job.slots) {  // a block that has had all of them is done with it
    if constexpr (kRotates) {
      if (channel >= job.width) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = row[i];
      turns.turn(out);
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i] = out[i];
    }
    return;
  }
  const auto slot_of = [&](int part) { return (t * job.slots + part) * job.heads + head; };
  float4 outputs[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= num_parts || channel >= job.width) break;
      outputs[n] = *reinterpret_cast<const float4*>(job.outputs + slot_of(first + n) * job.width + channel);
    }
  };
  load(0);  // on their way while factors are worked out
  if (threadIdx.x < 32) {
    const float max =
        all_merge_factors([&](int part) { return job.states[slot_of(part)]; }, num_parts, s_factors, s_sums);
    if (threadIdx.x == 0) s_max = max;
  }
  __syncthreads();
  if (channel >= job.width) return;
  float2 total = {s_max, 0};
  float values[4] = {};
  for (int first = 0; first < num_parts; first += kAtOnce) {
    if (first > 0) load(first);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= num_parts) break;
      const float2 factors = s_factors[first + n];
      if (factors.x < 0) continue;
      total.y = total.y * factors.x + s_sums[first + n] * factors.y;
      values[0] = values[0] * factors.x + outputs[n].x * factors.y;
      values[1] = values[1] * factors.x + outputs[n].y * factors.y;
      values[2] = values[2] * factors.x + outputs[n].z * factors.y;
      values[3] = values[3] * factors.x + outputs[n].w * factors.y;
    }
  }
  const float factor = last_factor(total, sink);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = numeric::bf16_from_float(values[i] * factor);
  turns.turn(out);
#pragma unroll
  for (int i = 0; i < 4; ++i) row[i] = out[i];
}

template <int kSlots>
void launch_attention_merge(const device::Queue& queue, const AttentionJob& job, const OutRotation& rotation) {
  const dim3 grid(static_cast<unsigned>(job.num_tokens), static_cast<unsigned>(job.heads));
  const auto kernel = rotation.dim > 0 ? merge_attention_parts<kSlots, true> : merge_attention_parts<kSlots, false>;
  launch("merge_attention_parts", queue, kernel, grid, kMergeThreads, 0, job, rotation);
}

}  // namespace tessera::backends::cuda_common
