// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda_common/expert_slots.cuh"

#include <algorithm>

#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/entry_cut.h"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda_common {

namespace {

constexpr int kBlockWarps = 8, kThreads = kBlockWarps * kSlotWarp;
constexpr int kSegment = 1024;     // slots that a block counts or lists
constexpr int kCheckedSlots = 32;  // that a block looks at for foreign ones

int64_t num_segments(int64_t num_slots) {
  return ceil_div<int64_t>(num_slots, kSegment);
}

// The slots of blockIdx.y's segment: its ids come into shared memory, by all threads of the block.
class Segment {
 public:
  __device__ explicit Segment(const SlotJob& job)
      : first_(static_cast<int32_t>(blockIdx.y) * kSegment),
        count_(min(static_cast<int32_t>(job.num_slots) - first_, kSegment)) {}
  __device__ int32_t first() const { return first_; }
  __device__ int32_t end() const { return first_ + count_; }
  __device__ void load(const SlotJob& job, int32_t (&s_experts)[kSegment]) const {
#pragma unroll
    for (int i = 0; i < kSegment / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      if (at < count_) s_experts[at] = job.experts[first_ + at] - static_cast<int32_t>(job.first_expert);
    }
    __syncthreads();
  }
  template <class Take>
  __device__ int32_t for_each_slot_of(const int32_t (&s_experts)[kSegment], int32_t expert, const Take& take) const {
    return for_each_slot(s_experts, count_, expert, [&](int32_t slot, int32_t rank) { take(first_ + slot, rank); });
  }

 private:
  int32_t first_, count_;
};

// This warp's expert in the grids below.
__device__ int32_t expert_of_warp() {
  return static_cast<int32_t>(blockIdx.x) * kBlockWarps + static_cast<int32_t>(threadIdx.x) / kSlotWarp;
}

// Grid: experts, a warp each, behind them slots to look at; by segments.
__global__ void __launch_bounds__(kThreads) count_slots(SlotJob job, SlotGroups groups, unsigned expert_blocks) {
  __shared__ int32_t s_experts[kSegment];
  wait_for_previous();
  const Segment segment(job);
  if (blockIdx.x >= expert_blocks) {
    const int32_t first = segment.first() + static_cast<int32_t>(blockIdx.x - expert_blocks) * kCheckedSlots;
    const int32_t end = min(first + kCheckedSlots, segment.end());
    for (int32_t slot = first + static_cast<int32_t>(threadIdx.x) / kSlotWarp; slot < end; slot += kBlockWarps) {
      zero_if_foreign(job, slot);
    }
    return;
  }
  segment.load(job, s_experts);
  const int32_t expert = expert_of_warp();
  if (expert >= job.num_local) return;
  const int32_t count = segment.for_each_slot_of(s_experts, expert, [](int32_t, int32_t) {});
  if (threadIdx.x % kSlotWarp == 0) groups.counts[blockIdx.y * job.num_local + expert] = count;
}

// Grid: experts, a warp each; by segments. Every block adds up what the experts before its own take.
__global__ void __launch_bounds__(kThreads) list_slots(SlotJob job, SlotGroups groups) {
  struct Range {
    int32_t begin, count, before, first_entry;  // positions; slots, and those of the segments before; work
  };
  __shared__ int32_t s_experts[kSegment];
  __shared__ Range s_ranges[kBlockWarps];
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kSlotWarp;
  const Segment segment(job);
  segment.load(job, s_experts);
  int32_t positions = 0, entries = 0;  // of the experts so far
  for (int64_t base = 0; base < job.num_local; base += kThreads) {
    const auto expert = static_cast<int32_t>(base) + thread;
    Range range{};
    if (expert < job.num_local) {
#pragma unroll 8
      for (unsigned i = 0; i < gridDim.y; ++i) {
        const int32_t count = groups.counts[i * job.num_local + expert];
        range.before += i < blockIdx.y ? count : 0;
        range.count += count;
      }
    }
    const auto position_sums = sum_before(round_up_to(range.count, kPositionGroup));
    const auto entry_sums = sum_before(EntryCut(range.count, job.work_slots, job.work_step).parts);
    range.begin = positions + position_sums.before, range.first_entry = entries + entry_sums.before;
    if (expert / kBlockWarps == static_cast<int32_t>(blockIdx.x)) s_ranges[expert % kBlockWarps] = range;
    positions += position_sums.total, entries += entry_sums.total;
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) groups.totals[0] = positions, groups.totals[1] = entries;
  __syncthreads();
  const int32_t expert = expert_of_warp();
  if (expert >= job.num_local) return;
  const Range range = s_ranges[thread / kSlotWarp];
  segment.for_each_slot_of(s_experts, expert,
                           [&](int32_t slot, int32_t rank) { groups.slots[range.begin + range.before + rank] = slot; });
  if (blockIdx.y > 0) return;
  const int32_t count = range.count;
  if (count + lane < round_up_to(count, kPositionGroup)) groups.slots[range.begin + count + lane] = -1;
  if (count == 0) return;
  const EntryCut cut(count, job.work_slots, job.work_step);
  for (int32_t part = lane; part < cut.parts; part += kSlotWarp) {
    groups.work[range.first_entry + part] = work_of(job, expert, range.begin + cut.begin(part), cut.size(part));
  }
}

unsigned blocks(int64_t warps) {
  return static_cast<unsigned>(ceil_div<int64_t>(warps, kBlockWarps));
}

}  // namespace

int64_t most_positions(const ops::MoeExperts::Desc& desc, int64_t num_slots) {
  return round_up<int64_t>(num_slots + (kPositionGroup - 1) * std::min(num_slots, desc.num_local), kPositionGroup);
}

int64_t most_work(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots) {
  return std::min(num_slots, num_slots / work_slots + desc.num_local);
}

void take_slot_groups(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, Workspace& workspace,
                      SlotGroups& groups) {
  groups.counts = workspace.take<int32_t>(num_segments(num_slots) * desc.num_local);
  groups.slots = workspace.take<int32_t>(most_positions(desc, num_slots));
  groups.totals = workspace.take<int32_t>(2);
  groups.work = workspace.take<ExpertWork>(most_work(desc, num_slots, work_slots));
}

void group_slots(const SlotJob& job, const SlotGroups& groups, device::Queue& queue) {
  const unsigned expert_blocks = blocks(job.num_local), checks = kSegment / kCheckedSlots;
  const auto segments = static_cast<unsigned>(num_segments(job.num_slots));
  launch("count_slots", queue, count_slots, dim3(expert_blocks + checks, segments), kThreads, 0, job, groups,
         expert_blocks);
  launch("list_slots", queue, list_slots, dim3(expert_blocks, segments), kThreads, 0, job, groups);
}

}  // namespace tessera::backends::cuda_common
