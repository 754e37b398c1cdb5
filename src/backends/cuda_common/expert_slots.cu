// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda_common/expert_slots.cuh"

#include <algorithm>

#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda_common {

namespace {

constexpr int kBlockWarps = 8, kThreads = kBlockWarps * kSlotWarp;

// Grid: experts, a warp each; then slots, a warp each.
__global__ void __launch_bounds__(kThreads) count_slots(SlotJob job, SlotGroups groups) {
  wait_for_previous();
  const int64_t expert_blocks = (job.num_local + kBlockWarps - 1) / kBlockWarps;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kSlotWarp;
  if (blockIdx.x >= expert_blocks) {
    const int64_t slot = item - expert_blocks * kBlockWarps;
    if (slot < job.num_slots) zero_if_foreign(job, slot);
  } else if (item < job.num_local) {
    const int32_t count = for_each_slot(job.experts, static_cast<int32_t>(job.num_slots),
                                        static_cast<int32_t>(job.first_expert + item), [](int32_t, int32_t) {});
    if (threadIdx.x % kSlotWarp == 0) groups.counts[item] = count;
  }
}

// Grid: experts, a warp each.
__global__ void __launch_bounds__(kThreads) list_slots(SlotJob job, SlotGroups groups) {
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % kSlotWarp;
  const int64_t expert = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kSlotWarp;
  if (expert >= job.num_local) return;
  // What the experts before take.
  unsigned positions = 0, entries = 0;
  for (int64_t other = lane; other < expert; other += kSlotWarp) {
    positions += static_cast<unsigned>(round_up_to(groups.counts[other], kPositionGroup));
    entries += static_cast<unsigned>((groups.counts[other] + job.work_slots - 1) / job.work_slots);
  }
  const auto begin = static_cast<int32_t>(__reduce_add_sync(~0u, positions));
  const auto first_entry = static_cast<int32_t>(__reduce_add_sync(~0u, entries));
  const int32_t count =
      for_each_slot(job.experts, static_cast<int32_t>(job.num_slots), static_cast<int32_t>(job.first_expert + expert),
                    [&](int32_t slot, int32_t rank) { groups.slots[begin + rank] = slot; });
  const int32_t padded = round_up_to(count, kPositionGroup),
                own_entries = (count + job.work_slots - 1) / job.work_slots;
  if (count + lane < padded) groups.slots[begin + count + lane] = -1;
  for (int32_t entry = lane; entry < own_entries; entry += kSlotWarp) {
    const int32_t before = entry * job.work_slots;
    groups.work[first_entry + entry] = work_of(job, expert, begin + before, min(count - before, job.work_slots));
  }
  if (expert == job.num_local - 1 && lane == 0) {
    groups.totals[0] = begin + padded, groups.totals[1] = first_entry + own_entries;
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
  groups.counts = workspace.take<int32_t>(desc.num_local);
  groups.slots = workspace.take<int32_t>(most_positions(desc, num_slots));
  groups.totals = workspace.take<int32_t>(2);
  groups.work = workspace.take<ExpertWork>(most_work(desc, num_slots, work_slots));
}

void group_slots(const SlotJob& job, const SlotGroups& groups, device::Queue& queue) {
  launch("count_slots", queue, count_slots, dim3(blocks(job.num_local) + blocks(job.num_slots)), kThreads, 0, job,
         groups);
  launch("list_slots", queue, list_slots, dim3(blocks(job.num_local)), kThreads, 0, job, groups);
}

}  // namespace tessera::backends::cuda_common
