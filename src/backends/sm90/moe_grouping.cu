// SPDX-License-Identifier: Apache-2.0
// Grouping of slots by expert, and their inputs in the order of the tiles that multiply them.
#include <algorithm>

#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/moe_job.cuh"

namespace tessera::backends::sm90 {

namespace {

using cuda_common::for_each_slot, cuda_common::round_up_to, cuda_common::wait_for_previous, cuda_common::work_of,
    cuda_common::zero_if_foreign;

constexpr int kWarp = cuda_common::kSlotWarp, kBlockWarps = 8, kThreads = kBlockWarps * kWarp;

// The token of `slot`, or null for none.
__device__ const uint16_t* input_of(const MoeJob& job, int32_t slot) {
  return slot < 0 ? nullptr : job.x + job.token_of.quotient(static_cast<uint32_t>(slot)) * job.hidden;
}

template <class Layout>
__device__ char* arranged_of(const MoeJob& job, int64_t first_position) {
  return job.scratch.x + Layout::bytes(first_position, job.hidden);
}

// By the blocks of a grid of all entries of work.
__device__ void reset_progress(const MoeScratch& s) {
  if (threadIdx.x > 0) return;
  s.progress[kFirstProgress + blockIdx.x] = 0;
  if (blockIdx.x == 0) s.progress[0] = 0;
}

// Grid: entries of work by 8 slots of theirs by parts of the columns.
template <class Layout>
__global__ void __launch_bounds__(kThreads) arrange_slots(MoeJob job) {
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  if (blockIdx.y == 0 && blockIdx.z == 0) reset_progress(s);
  if (static_cast<int32_t>(blockIdx.x) >= s.totals[1]) return;
  const ExpertWork& work = s.work[blockIdx.x];
  const int32_t before = static_cast<int32_t>(blockIdx.y) * kPositionGroup;
  if (before >= work.count) return;
  if (blockIdx.z == 0 && threadIdx.x < kPositionGroup) {
    const int32_t position = work.first + before + static_cast<int32_t>(threadIdx.x);
    s.weights[position] = job.weight_of(s.slots[position]);
  }
  arrange_rows<Layout>(arranged_of<Layout>(job, work.first) + blockIdx.y * Layout::kBytes, Layout::stride(work.count),
                       job.hidden, static_cast<int>(blockIdx.z),
                       [&](int row) { return input_of(job, s.slots[work.first + before + row]); });
}

// All of that at once. Grid: 8 positions each, which are an entry of work, by parts of the columns; every block counts
// for itself.
__global__ void __launch_bounds__(kThreads) group_few(MoeJob job) {
  __shared__ int32_t s_experts[kMostFewSlots], s_counts[kThreads], s_slots[kPositionGroup];
  __shared__ int32_t s_expert, s_begin;
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  const int thread = static_cast<int>(threadIdx.x), num_slots = static_cast<int>(job.num_slots);
  const int part = static_cast<int>(blockIdx.y);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kPositionGroup;
  for (int slot = thread; slot < num_slots; slot += kThreads) {
    const int64_t expert = job.experts[slot] - job.first_expert;
    s_experts[slot] = expert >= 0 && expert < job.num_local ? static_cast<int32_t>(expert) : -1;
  }
  if (part == 0) reset_progress(s);
  if (thread < kPositionGroup) s_slots[thread] = -1;
  if (thread == 0) s_expert = -1;
  if (part == 0) {
    for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kBlockWarps + thread / kWarp; slot < num_slots;
         slot += static_cast<int64_t>(gridDim.x) * kBlockWarps) {
      zero_if_foreign(job, slot);
    }
  }
  int32_t end = 0;  // of the experts so far
  for (int32_t base = 0; base < job.num_local; base += kThreads) {
    s_counts[thread] = 0;
    __syncthreads();
    for (int slot = thread; slot < num_slots; slot += kThreads) {
      const int32_t expert = s_experts[slot] - base;
      // Whole numbers: the order of these additions changes nothing.
      if (expert >= 0 && expert < kThreads) atomicAdd(s_counts + expert, 1);
    }
    __syncthreads();
    const int32_t count = s_counts[thread];
    const auto sums = cuda_common::sum_before(round_up_to(count, kPositionGroup));
    const int32_t begin = end + sums.before;
    if (begin <= first && first < begin + count) s_expert = base + thread, s_begin = begin;
    end += sums.total;
  }
  if (blockIdx.x == 0 && part == 0 && thread == 0) s.totals[0] = end, s.totals[1] = end / kPositionGroup;
  __syncthreads();
  if (s_expert < 0) return;  // nobody's positions
  if (thread < kWarp) {
    const int32_t before = first - s_begin;
    const int32_t count = for_each_slot(s_experts, num_slots, s_expert, [&](int32_t slot, int32_t rank) {
      if (rank >= before && rank < before + kPositionGroup) s_slots[rank - before] = slot;
    });
    if (thread == 0 && part == 0) {
      s.work[blockIdx.x] = work_of(job, s_expert, first, min(count - before, kPositionGroup));
    }
  }
  __syncthreads();
  if (thread < kPositionGroup && part == 0) {
    s.slots[first + thread] = s_slots[thread];
    s.weights[first + thread] = job.weight_of(s_slots[thread]);
  }
  arrange_rows<LaneInputs>(arranged_of<LaneInputs>(job, first), LaneInputs::kBytes, job.hidden, part,
                           [&](int row) { return input_of(job, s_slots[row]); });
}

}  // namespace

int64_t layout_moe_scratch(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, char* base,
                           MoeScratch& scratch) {
  cuda_common::Workspace workspace(base);
  const int64_t positions = cuda_common::most_positions(desc, num_slots);
  scratch.x = workspace.take<char>(ProductInputs::bytes(positions, desc.hidden));
  scratch.h = workspace.take<char>(ProductInputs::bytes(positions, padded_inner(desc)));
  scratch.weights = workspace.take<float>(positions);
  scratch.progress = workspace.take<uint32_t>(kFirstProgress + most_work(desc, num_slots, work_slots));
  take_slot_groups(desc, num_slots, work_slots, workspace, scratch);
  const int64_t num_tokens = num_slots / desc.top_k;
  const bool is_rounded = cuda_common::needs_input_rows(desc.input),
             is_scaled = cuda_common::has_row_factors(desc.input);
  scratch.rounded_x = is_rounded ? workspace.take<uint16_t>(num_tokens * desc.hidden) : nullptr;
  scratch.x_factors = is_scaled ? workspace.take<float>(num_tokens) : nullptr;
  scratch.h_factors = is_scaled ? workspace.take<float>(positions) : nullptr;
  return workspace.used();
}

template <class Layout>
void group_many_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  const dim3 groups(static_cast<unsigned>(most_work(desc, job.num_slots, job.work_slots)),
                    static_cast<unsigned>(ceil_div(job.work_slots, kPositionGroup)), arranged_parts(desc.hidden));
  cuda_common::group_slots(job, job.scratch, queue);
  cuda_common::launch("arrange_slots", queue, arrange_slots<Layout>, groups, kThreads, 0, job);
}

template void group_many_slots<ProductInputs>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);
template void group_many_slots<LaneInputs>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);

void group_few_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  const dim3 groups(static_cast<unsigned>(most_work(desc, job.num_slots, job.work_slots)), arranged_parts(desc.hidden));
  cuda_common::launch("group_few", queue, group_few, groups, kThreads, 0, job);
}

}  // namespace tessera::backends::sm90
