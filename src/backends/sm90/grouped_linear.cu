// SPDX-License-Identifier: Apache-2.0
// grouped_linear with packed weights: groups of many rows by wide_sums.cuh, of few by few_sums.cuh, next to none by the
// portable backend's stream. What bounds it: the tensor cores' BF16 products, or the read of the matrices.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/row_groups.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/sm90/few_sums.cuh"
#include "backends/sm90/kernels.h"
#include "backends/sm90/wide_sums.cuh"

namespace tessera::backends::sm90 {

namespace {

using cuda_common::GroupInputs, cuda_common::kPositionGroup, cuda_common::RowGroups, cuda_common::RowWork,
    cuda_common::most_row_work;
using ops::GroupedLinear;

struct Scratch {
  RowGroups groups;
  GroupInputs inputs;
  char* arranged;  // (arranged_inputs.cuh): [positions, in]
};

int64_t layout_scratch(const GroupedLinear::Desc& desc, int64_t num_rows, int32_t tile_rows, void* base,
                       Scratch& scratch) {
  cuda_common::Workspace workspace(base);
  take_row_groups(desc, num_rows, tile_rows, workspace, scratch.groups);
  take_group_inputs(desc, num_rows, workspace, scratch.inputs);
  const int64_t positions = cuda_common::most_row_positions(desc, num_rows);
  scratch.arranged = workspace.take<char>(ProductInputs::bytes(positions, desc.in));  // as long in every layout
  return workspace.used();
}

struct GroupedJob {
  RowGroups groups;
  const uint16_t* x;     // [rows, in]
  const float* factors;  // [rows]; null: 1
  char* arranged;
  cuda_common::Values out;  // [rows, num_outputs]
  int64_t in;
  int32_t num_outputs, tile_rows;
};

// Blocks take 8 rows of an entry of work, by parts of the columns, one after another: how many there are is known here
// only.
template <class Layout>
__global__ void __launch_bounds__(256) arrange_groups(GroupedJob job, int32_t parts) {
  cuda_common::wait_for_previous();
  const int32_t eights = job.tile_rows / kPositionGroup;
  const int64_t count = int64_t{job.groups.totals[1]} * eights * parts;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const RowWork& work = job.groups.work[item / (eights * parts)];
    const auto in_work = static_cast<int32_t>(item % (eights * parts));
    const int32_t eight = in_work / parts, before = eight * kPositionGroup;
    if (before >= work.count) continue;
    char* to = job.arranged + Layout::bytes(work.position, job.in) + eight * Layout::kBytes;
    arrange_rows<Layout>(to, Layout::stride(work.count), job.in, in_work % parts, [&](int row) {
      const int64_t at = work.first_row + before + row;
      return before + row < work.count ? job.x + at * job.in : nullptr;
    });
  }
}

// What tiles of both kernels have.
struct GroupedTraits {
  static constexpr auto kFormat = GroupedLinear::Desc::format;
  static constexpr bool kFolds = false;
  static constexpr bool kKnowsWeights = false;  // chosen by the kernel before
  static constexpr int kTileTokens = 0;         // as many as it happens
};

// An entry of work by some of its matrix's rows.
template <class Shape>
class GroupedTiles : public GroupedTraits {
 public:
  using Inputs = typename Shape::Inputs;
  using Layout = cuda_common::PackedNvfp4;
  using Share = cuda_common::PackedShare<kFormat>;
  static constexpr int kRows = Shape::kSlots * Layout::kRows;
  struct Place {
    const RowWork* work;
    int first_row;  // of the matrix
  };

  __device__ explicit GroupedTiles(const GroupedJob& job)
      : job_(job),
        row_tiles_((job.num_outputs + kRows - 1) / kRows),
        count_(uniform(job.groups.totals[1]) * row_tiles_) {}

  __device__ int width() const { return static_cast<int>(job_.in); }
  __device__ int last_unit_blocks() const { return Layout::kBlocks; }
  __device__ int count() const { return count_; }
  __device__ Place place(int tile) const {
    const int entry = tile / row_tiles_;
    return {job_.groups.work + entry, (tile - entry * row_tiles_) * kRows};
  }
  __device__ const char* inputs(const Place& place) const {
    return job_.arranged + Inputs::bytes(place.work->position, job_.in);
  }
  __device__ int tokens(const Place& place) const { return place.work->count; }
  __device__ const char* unit(const Place& place, int slot) const {
    const int row = place.first_row + slot * Layout::kRows;
    return row < job_.num_outputs ? static_cast<const char*>(place.work->data) + Layout::offset(row, 0, job_.in)
                                  : nullptr;
  }
  __device__ Share share(const typename Shape::Weights& stage, int block, int part, int warp, int lane) const {
    return stage.share_of(warp, block, part, lane);
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    const int count = uniform(place.work->count);
    const int64_t first = place.work->first_row;
    const float scale = place.work->tensor_scale;
    const float* factors = job_.factors;
    // As `linear` rounds: the row's factor comes last.
    const auto value = [&](int i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float y = sums[i] * Share::kFactor * scale;
      return factors == nullptr || token >= count ? y : y * factors[first + token];
    };
    if (job_.out.is_bf16) {
      const int row = place.first_row + warp * Layout::kRows + lane % 4 * 2;  // once transposed
      uint16_t* out = static_cast<uint16_t*>(job_.out.data) + (first + lane / 4) * job_.num_outputs + row;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        if (j * 8 >= count) break;
        const uint32_t low = ptx::transpose_8x8(ptx::bf16_pair(value(j * 4), value(j * 4 + 1)));
        const uint32_t high = ptx::transpose_8x8(ptx::bf16_pair(value(j * 4 + 2), value(j * 4 + 3)));
        if (row >= job_.num_outputs || j * 8 + lane / 4 >= count) continue;
        uint16_t* to = out + static_cast<int64_t>(j * 8) * job_.num_outputs;
        *reinterpret_cast<uint32_t*>(to) = low, *reinterpret_cast<uint32_t*>(to + 8) = high;
      }
      return;
    }
    const int row = place.first_row + warp * Layout::kRows + lane / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, at_row = row + i % 4 / 2 * 8;
      if (token >= count || at_row >= job_.num_outputs) continue;
      static_cast<float*>(job_.out.data)[(first + token) * job_.num_outputs + at_row] = value(i);
    }
  }

 private:
  const GroupedJob& job_;
  const int row_tiles_, count_;
};

// Blocks of arrange_groups that a multiprocessor holds at once.
constexpr int64_t kArrangeBlocks = 8;

template <class Shape>
void run(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, device::Queue& queue) {
  constexpr int32_t kTileRows = Shape::kTokens;
  Scratch scratch{};
  layout_scratch(desc, args.num_rows, kTileRows, args.workspace, scratch);
  group_rows(desc, args, kTileRows, Shape::kTokenStep, scratch.groups, queue);
  const uint16_t* x = round_group_inputs(desc, args, scratch.groups, scratch.inputs, queue);
  const GroupedJob job{scratch.groups,
                       x,
                       scratch.inputs.factors,
                       scratch.arranged,
                       cuda_common::values_of(args.out),
                       desc.in,
                       static_cast<int32_t>(desc.out),
                       kTileRows};
  const int64_t most_work = most_row_work(desc, args.num_rows, kTileRows), parts = arranged_parts(desc.in);
  const int64_t blocks =
      std::min(most_work * (kTileRows / kPositionGroup) * parts, kArrangeBlocks * cuda_common::multiprocessors());
  cuda_common::launch("arrange_groups", queue, arrange_groups<typename Shape::Inputs>,
                      dim3(static_cast<unsigned>(blocks)), 256, 0, job, static_cast<int32_t>(parts));
  using Tiles = GroupedTiles<Shape>;
  const int64_t most_tiles = most_work * ceil_div<int64_t>(desc.out, Tiles::kRows);
  if constexpr (std::is_same_v<Shape, Few>) {
    launch_few<Tiles>("grouped_few", queue, most_tiles, job);
  } else {
    launch_wide<Tiles>("grouped_wide", queue, most_tiles, job);
  }
}

}  // namespace

bool grouped_linear_supports(const GroupedLinear::Desc& desc, std::string& why_not) {
  return cuda::grouped_linear_packed_supports(desc, why_not);
}

int64_t grouped_linear_workspace(const GroupedLinear::Desc& desc, int64_t max_rows) {
  Scratch scratch{};
  const int64_t portable = cuda::grouped_linear_workspace(desc, max_rows);
  if (!has_wide_tiles(desc)) return portable;
  return std::max({portable, layout_scratch(desc, max_rows, Few::kTokens, nullptr, scratch),
                   layout_scratch(desc, max_rows, Wide::kTokens, nullptr, scratch)});
}

void grouped_linear(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, device::Queue& queue) {
  if (args.num_rows == 0) return;
  switch (grouped_kernels(desc, args.num_rows, args.expected_rows, cuda_common::multiprocessors())) {
    case ExpertKernels::kPortable:
      return cuda::grouped_linear_packed(desc, args, queue);
    case ExpertKernels::kFew:
      return run<Few>(desc, args, queue);
    case ExpertKernels::kWide:
      return run<Wide>(desc, args, queue);
  }
}

}  // namespace tessera::backends::sm90
