// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda_common/row_groups.cuh"

#include <algorithm>

#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/entry_cut.h"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda_common {

namespace {

using ops::RowLayout;

constexpr int kWarp = 32, kBlockWarps = 8, kThreads = kBlockWarps * kWarp;

struct Job {
  const int32_t* sizes;
  const ops::WeightView* weights;
  bool is_masked;
  int32_t num_groups, num_rows, max_rows;  // max_rows: masked, of a group
  int32_t tile_rows, tile_step;
};

__device__ int32_t clamped(int32_t value, int32_t most) {
  return min(max(value, 0), most);
}

// The largest value of the lanes of a warp up to this one.
__device__ int32_t largest_up_to(int32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t lower = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = max(value, lower);
  }
  return value;
}

// The largest of the values of the threads up to this one and of `before`. All threads of the block take part.
__device__ int32_t largest_of_block(int32_t value, int32_t before) {
  __shared__ int32_t s_warps[kBlockWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t largest = largest_up_to(value);
  __syncthreads();  // the last call's values have been read
  if (lane == kWarp - 1) s_warps[warp] = largest;
  __syncthreads();
  for (int i = 0; i < warp; ++i) largest = max(largest, s_warps[i]);
  return max(largest, before);
}

struct Span {
  int32_t begin, end;
};

// Of `group`, this thread's; groups of the threads are consecutive. Where there is no such group: none, and the end is
// the last group's. `before`: the end of the groups before the block's. All threads of the block take part.
__device__ Span rows_of(const Job& job, int32_t group, int32_t before) {
  const bool is_group = group < job.num_groups;
  if (job.is_masked) {
    const int32_t begin = min(group, job.num_groups) * job.max_rows;
    return {begin, begin + (is_group ? clamped(job.sizes[group], job.max_rows) : 0)};
  }
  const int32_t first = clamped(job.sizes[min(group, job.num_groups)], job.num_rows);
  const int32_t begin = largest_of_block(first, before);
  return {begin, is_group ? max(begin, clamped(job.sizes[group + 1], job.num_rows)) : begin};
}

// Grid: groups, a warp each. Every block adds up what all groups take.
__global__ void __launch_bounds__(kThreads) list_rows(Job job, RowGroups groups) {
  struct Range {
    int32_t begin, count, first_entry, position;
  };
  __shared__ Range s_ranges[kBlockWarps];
  __shared__ int32_t s_end;
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  int32_t positions = 0, entries = 0, end = 0;  // of the groups so far
  for (int32_t base = 0; base < job.num_groups; base += kThreads) {
    const int32_t group = base + thread;
    const Span rows = rows_of(job, group, end);
    const int32_t count = rows.end - rows.begin;
    const auto position_sums = sum_before(round_up_to(count, kPositionGroup));
    const auto entry_sums = sum_before(EntryCut(count, job.tile_rows, job.tile_step).parts);
    if (group < job.num_groups && group / kBlockWarps == static_cast<int32_t>(blockIdx.x)) {
      s_ranges[group % kBlockWarps] = {rows.begin, count, entries + entry_sums.before,
                                       positions + position_sums.before};
    }
    if (blockIdx.x == 0 && group == 0) groups.totals[2] = rows.begin;
    __syncthreads();  // everybody has read s_end
    if (thread == kThreads - 1) s_end = rows.end;
    __syncthreads();
    positions += position_sums.total, entries += entry_sums.total, end = s_end;
  }
  if (blockIdx.x == 0 && thread == 0) {
    groups.totals[0] = positions, groups.totals[1] = entries, groups.totals[3] = end;
  }
  __syncthreads();
  const int32_t group = static_cast<int32_t>(blockIdx.x) * kBlockWarps + thread / kWarp;
  if (group >= job.num_groups) return;
  const Range range = s_ranges[thread / kWarp];
  if (range.count == 0) return;
  const ops::WeightView& weight = job.weights[group];
  const EntryCut cut(range.count, job.tile_rows, job.tile_step);
  for (int32_t part = lane; part < cut.parts; part += kWarp) {
    const int32_t before = cut.begin(part);
    groups.work[range.first_entry + part] = {weight.data,          weight.block_scales, weight.tensor_scale,
                                             range.begin + before, cut.size(part),      range.position + before};
  }
}

// A thread per row of x.
__global__ void __launch_bounds__(kThreads) mark_rows(Job job, const int32_t* totals, int32_t* marks) {
  wait_for_previous();
  const int64_t at = item_index();
  if (at >= job.num_rows) return;
  const auto row = static_cast<int32_t>(at);
  const bool is_there = job.is_masked ? row % job.max_rows < clamped(job.sizes[row / job.max_rows], job.max_rows)
                                      : row >= totals[2] && row < totals[3];
  marks[row] = is_there ? 0 : -1;
}

Job job_of(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, int32_t tile_rows,
           int32_t tile_step) {
  return {args.sizes,
          args.weights,
          desc.layout == RowLayout::kMasked,
          static_cast<int32_t>(desc.num_groups),
          static_cast<int32_t>(args.num_rows),
          static_cast<int32_t>(args.num_rows / desc.num_groups),
          tile_rows,
          tile_step};
}

}  // namespace

int64_t most_row_work(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int32_t tile_rows) {
  return std::min(num_rows, num_rows / tile_rows + desc.num_groups);
}

int64_t most_row_positions(const ops::GroupedLinear::Desc& desc, int64_t num_rows) {
  return round_up<int64_t>(num_rows + (kPositionGroup - 1) * std::min(num_rows, desc.num_groups), kPositionGroup);
}

void take_row_groups(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int32_t tile_rows, Workspace& workspace,
                     RowGroups& groups) {
  groups.totals = workspace.take<int32_t>(4);
  groups.work = workspace.take<RowWork>(most_row_work(desc, num_rows, tile_rows));
}

void group_rows(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, int32_t tile_rows,
                int32_t tile_step, const RowGroups& groups, const device::Queue& queue) {
  ops::check_num_rows(desc, args.num_rows);
  launch("list_rows", queue, list_rows, grid_for(desc.num_groups, kBlockWarps), kThreads, 0,
         job_of(desc, args, tile_rows, tile_step), groups);
}

void take_group_inputs(const ops::GroupedLinear::Desc& desc, int64_t num_rows, Workspace& workspace,
                       GroupInputs& inputs) {
  inputs = {};
  if (!needs_input_rows(desc.input)) return;
  inputs.rounded = workspace.take<uint16_t>(num_rows * desc.in);
  if (has_row_factors(desc.input)) inputs.factors = workspace.take<float>(num_rows);
  inputs.marks = workspace.take<int32_t>(num_rows);
}

const uint16_t* round_group_inputs(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                                   const RowGroups& groups, const GroupInputs& inputs, const device::Queue& queue) {
  if (!needs_input_rows(desc.input)) return static_cast<const uint16_t*>(args.x.data);
  launch("mark_rows", queue, mark_rows, grid_for(args.num_rows, kThreads), kThreads, 0, job_of(desc, args, 0, 0),
         static_cast<const int32_t*>(groups.totals), inputs.marks);
  const ExpertRows marked{.experts = inputs.marks, .num_local = 1};
  const TensorView rows{inputs.rounded, DType::kBF16, {args.num_rows, desc.in}};
  prepare_input_rows(desc.input, {args.x.data, DType::kBF16, rows.shape}, args.num_rows, desc.in, &marked, rows,
                     inputs.factors, queue);
  return inputs.rounded;
}

}  // namespace tessera::backends::cuda_common
