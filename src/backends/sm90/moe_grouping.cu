// SPDX-License-Identifier: Apache-2.0
// Grouping of slots by expert, and their inputs in the order of the tiles that multiply them. Whole numbers in a fixed
// order: nothing depends on which thread is first.
#include <algorithm>

#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/moe_job.cuh"

namespace tessera::backends::sm90 {

namespace {

using cuda_common::wait_for_previous;

constexpr int kWarp = 32, kBlockWarps = 8, kThreads = kBlockWarps * kWarp;

__device__ int32_t round_up_to(int32_t count, int32_t step) {
  return (count + step - 1) / step * step;
}

// Calls take(slot, rank) for the expert's slots in ascending order, by the lanes of a warp; how many there are.
// `experts` are the slots' ids.
template <class Take>
__device__ int32_t for_each_slot(const int32_t* experts, int32_t num_slots, int32_t expert, const Take& take) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int32_t count = 0;
#pragma unroll 4
  for (int32_t first = 0; first < num_slots; first += kWarp) {
    const int32_t slot = first + lane;
    const bool is_mine = slot < num_slots && experts[slot] == expert;
    const unsigned mine = __ballot_sync(~0u, is_mine);
    if (is_mine) take(slot, count + __popc(mine & ((1u << lane) - 1)));
    count += __popc(mine);
  }
  return count;
}

// By a warp.
__device__ void zero_if_foreign(const MoeJob& job, int64_t slot) {
  const int64_t expert = job.experts[slot] - job.first_expert;
  if (expert >= 0 && expert < job.num_local) return;
  for (int64_t i = threadIdx.x % kWarp; i < job.hidden; i += kWarp) job.out[slot * job.hidden + i] = 0;
}

__device__ ExpertWork work_of(const MoeJob& job, int64_t expert, int32_t first, int32_t count) {
  ExpertWork work;
  const ops::WeightView* const views[3] = {job.w1 + expert, job.w3 + expert, job.w2 + expert};
#pragma unroll
  for (int i = 0; i < 3; ++i) work.data[i] = views[i]->data, work.tensor_scales[i] = views[i]->tensor_scale;
  work.first = first, work.count = count;
  return work;
}

// The token of `slot`, or null for none.
__device__ const uint16_t* input_of(const MoeJob& job, int32_t slot) {
  return slot < 0 ? nullptr : job.x + job.token_of.quotient(static_cast<uint32_t>(slot)) * job.hidden;
}

__device__ char* arranged_of(const MoeJob& job, int64_t first_position) {
  return job.scratch.x + ArrangedInputs::bytes(first_position, job.hidden);
}

// Grid: experts, a warp each; then slots, a warp each.
__global__ void __launch_bounds__(kThreads) count_slots(MoeJob job) {
  wait_for_previous();
  const int64_t expert_blocks = (job.num_local + kBlockWarps - 1) / kBlockWarps;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarp;
  if (blockIdx.x >= expert_blocks) {
    const int64_t slot = item - expert_blocks * kBlockWarps;
    if (slot < job.num_slots) zero_if_foreign(job, slot);
  } else if (item < job.num_local) {
    const int32_t count = for_each_slot(job.experts, static_cast<int32_t>(job.num_slots),
                                        static_cast<int32_t>(job.first_expert + item), [](int32_t, int32_t) {});
    if (threadIdx.x % kWarp == 0) job.scratch.counts[item] = count;
  }
}

// Grid: experts, a warp each.
__global__ void __launch_bounds__(kThreads) list_slots(MoeJob job) {
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t expert = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarp;
  if (expert >= job.num_local) return;
  // What the experts before take.
  unsigned positions = 0, entries = 0;
  for (int64_t other = lane; other < expert; other += kWarp) {
    positions += static_cast<unsigned>(round_up_to(s.counts[other], kPositionGroup));
    entries += static_cast<unsigned>((s.counts[other] + job.work_slots - 1) / job.work_slots);
  }
  const auto begin = static_cast<int32_t>(__reduce_add_sync(~0u, positions));
  const auto first_entry = static_cast<int32_t>(__reduce_add_sync(~0u, entries));
  const int32_t count =
      for_each_slot(job.experts, static_cast<int32_t>(job.num_slots), static_cast<int32_t>(job.first_expert + expert),
                    [&](int32_t slot, int32_t rank) { s.slots[begin + rank] = slot; });
  const int32_t padded = round_up_to(count, kPositionGroup),
                own_entries = (count + job.work_slots - 1) / job.work_slots;
  if (count + lane < padded) s.slots[begin + count + lane] = -1;
  for (int32_t entry = lane; entry < own_entries; entry += kWarp) {
    const int32_t before = entry * job.work_slots;
    s.work[first_entry + entry] = work_of(job, expert, begin + before, min(count - before, job.work_slots));
  }
  if (expert == job.num_local - 1 && lane == 0) s.totals[0] = begin + padded, s.totals[1] = first_entry + own_entries;
}

// Grid: entries of work by 8 slots of theirs.
__global__ void __launch_bounds__(kThreads) arrange_slots(MoeJob job) {
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.totals[1]) return;
  const ExpertWork& work = s.work[blockIdx.x];
  const int32_t before = static_cast<int32_t>(blockIdx.y) * kPositionGroup;
  if (before >= work.count) return;
  arrange_rows<ProductInputs>(arranged_of(job, work.first) + blockIdx.y * ArrangedInputs::kBytes,
                              ArrangedInputs::stride(work.count), job.hidden,
                              [&](int row) { return input_of(job, s.slots[work.first + before + row]); });
}

// All of that at once. Grid: 8 positions each, which are an entry of work; every block counts for itself.
__global__ void __launch_bounds__(kThreads) group_few(MoeJob job) {
  __shared__ int32_t s_experts[kMostFewSlots], s_slots[kPositionGroup];
  __shared__ int32_t s_expert, s_begin;
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  const int thread = static_cast<int>(threadIdx.x), num_slots = static_cast<int>(job.num_slots);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kPositionGroup;
  for (int slot = thread; slot < num_slots; slot += kThreads) {
    s_experts[slot] = job.experts[slot] - static_cast<int32_t>(job.first_expert);
  }
  if (thread < kPositionGroup) s_slots[thread] = -1;
  if (thread == 0) s_expert = -1;
  __syncthreads();
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kBlockWarps + thread / kWarp; slot < num_slots;
       slot += static_cast<int64_t>(gridDim.x) * kBlockWarps) {
    zero_if_foreign(job, slot);
  }
  int32_t end = 0;  // of the experts so far
  for (int64_t base = 0; base < job.num_local; base += kThreads) {
    const auto expert = static_cast<int32_t>(base) + thread;
    int32_t count = 0;
    if (expert < job.num_local) {
#pragma unroll 8
      for (int slot = 0; slot < num_slots; ++slot) count += s_experts[slot] == expert;
    }
    const auto sums = cuda_common::sum_before(round_up_to(count, kPositionGroup));
    const int32_t begin = end + sums.before;
    if (begin <= first && first < begin + count) s_expert = expert, s_begin = begin;
    end += sums.total;
  }
  if (blockIdx.x == 0 && thread == 0) s.totals[0] = end, s.totals[1] = end / kPositionGroup;
  __syncthreads();
  if (s_expert < 0) return;  // nobody's positions
  if (thread < kWarp) {
    const int32_t before = first - s_begin;
    const int32_t count = for_each_slot(s_experts, num_slots, s_expert, [&](int32_t slot, int32_t rank) {
      if (rank >= before && rank < before + kPositionGroup) s_slots[rank - before] = slot;
    });
    if (thread == 0) s.work[blockIdx.x] = work_of(job, s_expert, first, min(count - before, kPositionGroup));
  }
  __syncthreads();
  if (thread < kPositionGroup) s.slots[first + thread] = s_slots[thread];
  arrange_rows<LaneInputs>(arranged_of(job, first), ArrangedInputs::kBytes, job.hidden,
                           [&](int row) { return input_of(job, s_slots[row]); });
}

unsigned warps(int64_t items) {
  return static_cast<unsigned>(ceil_div<int64_t>(items, kBlockWarps));
}

}  // namespace

int64_t most_positions(const ops::MoeExperts::Desc& desc, int64_t num_slots) {
  return round_up<int64_t>(num_slots + (kPositionGroup - 1) * std::min(num_slots, desc.num_local), kPositionGroup);
}

int64_t most_work(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots) {
  return std::min(num_slots, num_slots / work_slots + desc.num_local);
}

int64_t layout_moe_scratch(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, char* base,
                           MoeScratch& scratch) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base == nullptr ? nullptr : base + used;
    used += round_up<int64_t>(bytes, 256);
    return at;
  };
  const int64_t positions = most_positions(desc, num_slots), entries = most_work(desc, num_slots, work_slots);
  scratch.x = take(ArrangedInputs::bytes(positions, desc.hidden));
  scratch.h = take(ArrangedInputs::bytes(positions, desc.inner));
  scratch.counts = reinterpret_cast<int32_t*>(take(desc.num_local * 4));
  scratch.slots = reinterpret_cast<int32_t*>(take(positions * 4));
  scratch.totals = reinterpret_cast<int32_t*>(take(2 * 4));
  scratch.work = reinterpret_cast<ExpertWork*>(take(entries * static_cast<int64_t>(sizeof(ExpertWork))));
  return used;
}

void group_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  const dim3 groups(static_cast<unsigned>(most_work(desc, job.num_slots, job.work_slots)),
                    static_cast<unsigned>(ceil_div(job.work_slots, kPositionGroup)));
  cuda_common::launch("count_slots", queue, count_slots, dim3(warps(desc.num_local) + warps(job.num_slots)), kThreads,
                      0, job);
  cuda_common::launch("list_slots", queue, list_slots, dim3(warps(desc.num_local)), kThreads, 0, job);
  cuda_common::launch("arrange_slots", queue, arrange_slots, groups, kThreads, 0, job);
}

void group_few_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  const auto groups = static_cast<unsigned>(most_work(desc, job.num_slots, job.work_slots));
  cuda_common::launch("group_few", queue, group_few, dim3(groups), kThreads, 0, job);
}

}  // namespace tessera::backends::sm90
