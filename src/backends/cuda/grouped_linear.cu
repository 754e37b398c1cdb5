// SPDX-License-Identifier: Apache-2.0
// grouped_linear: rows are cut into tiles of up to 8 of one group on the device, then multiplied as `linear` multiplies
// its tokens: half a warp to a weight row; or, on tensor cores, 16 weight rows at a time, packed ones as a stream
// (weight_stream.cuh), those of odd widths tile by tile. What bounds it: the read of the matrices that have rows.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/packed_ring.cuh"
#include "backends/cuda_common/row_groups.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr auto kFormat = ops::GroupedLinear::Desc::format;
constexpr int kRowsPerBlock = 8;

struct Scratch {
  RowGroups groups;
  GroupInputs inputs;
};

int64_t layout_scratch(const ops::GroupedLinear::Desc& desc, int64_t num_rows, void* base, Scratch& scratch) {
  Workspace workspace(base);
  take_row_groups(desc, num_rows, kTileTokens, workspace, scratch.groups);
  take_group_inputs(desc, num_rows, workspace, scratch.inputs);
  return workspace.used();
}

struct Job {
  RowGroups groups;
  const uint16_t* x;     // [rows, in]
  const float* factors;  // [rows]; null: 1
  Values out;            // [rows, out]
  int64_t in, num_outputs;
  FastDivisor row_tiles;  // of 16 weight rows
};

// Of tensor cores, as `linear` stores them, and in a4 `scale_outputs` after it (rounded_linear.h).
template <class Share>
__device__ void store_sum(const Job& job, const RowWork& work, int64_t row, int64_t weight_row, float sum) {
  float value = sum * Share::kFactor * work.tensor_scale;
  if (job.factors != nullptr) value *= job.factors[row];
  job.out.store(row * job.num_outputs + weight_row, value);
}

// For stream_tiles().
class Tiles {
 public:
  static constexpr int kPasses = 1;
  struct Place {
    const RowWork* work;
    int32_t first_row;  // of the matrix
  };
  __device__ explicit Tiles(const Job& job) : job_(job), num_entries_(job.groups.totals[1]) {}

  __device__ int count() const { return num_entries_ * static_cast<int>(job_.row_tiles.divisor()); }
  __device__ Place place(int tile) const {
    const uint32_t at = static_cast<uint32_t>(tile), entry = job_.row_tiles.quotient(at);
    return {job_.groups.work + entry, static_cast<int32_t>((at - entry * job_.row_tiles.divisor()) * kTileRows)};
  }
  __device__ TileWeights weights(const Place& place, int) const {
    return {place.work->data, place.work->scales, place.first_row, job_.num_outputs};
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    const int32_t in_work = min(static_cast<int32_t>(threadIdx.x) % kWarp / 4, place.work->count - 1);
    return job_.x + static_cast<int64_t>(place.work->first_row + in_work) * job_.in;
  }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[1], Ticket) const {
    const int64_t weight_row = place.first_row + streamed_row(at);
    const int in_work = streamed_token(at);
    if (weight_row >= job_.num_outputs || in_work >= place.work->count) return;
    store_sum<PackedShare<kFormat>>(job_, *place.work, place.work->first_row + in_work, weight_row, sums[0]);
  }

 private:
  const Job& job_;
  const int num_entries_;
};

template <class Ring>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2) grouped_stream(Job job, StreamShape shape) {
  wait_for_previous();
  const Tiles tiles(job);
  const int num_tiles = tiles.count();
  float* s_sums = dynamic_shared<float>();  // then the rings
  Ring ring(shape, num_tiles, tiles, reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(1)));
  stream_tiles(shape, num_tiles, tiles, ring, s_sums);
}

// Grid: entries of work by tiles of 16 weight rows. A warp per chunk at a time.
__global__ void __launch_bounds__(kMaxWarps* kWarp) grouped_mma(Job job) {
  __shared__ float s_parts[kMaxWarps][kTileSums], s_sums[kTileSums];
  wait_for_previous();
  if (static_cast<int32_t>(blockIdx.x) >= job.groups.totals[1]) return;
  const RowWork work = job.groups.work[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTileRows;
  const auto row_of_lane = [&](int r) { return min(first + lane / 4 + 8 * r, job.num_outputs - 1); };
  const CheckpointRows<kFormat> weight{work.data, work.scales, job.in, {row_of_lane(0), row_of_lane(1)}};
  const Operands<1> operands{
      {lane / 4 < work.count ? job.x + static_cast<int64_t>(work.first_row + lane / 4) * job.in : nullptr}};
  sum_tile(weight, operands, s_parts, s_sums);
  for (int at = static_cast<int>(threadIdx.x); at < kTileSums; at += static_cast<int>(blockDim.x)) {
    const int64_t weight_row = first + row_of_sum(at);
    const int in_work = token_of_sum(at);
    if (weight_row >= job.num_outputs || in_work >= work.count) continue;
    store_sum<WeightShare<kFormat>>(job, work, work.first_row + in_work, weight_row, s_sums[at]);
  }
}

// Grid: entries of work by groups of weight rows.
__global__ void __launch_bounds__(kRowsPerBlock* kLanes) grouped_simple(Job job) {
  wait_for_previous();
  if (static_cast<int32_t>(blockIdx.x) >= job.groups.totals[1]) return;
  const RowWork work = job.groups.work[blockIdx.x];
  const int64_t at = static_cast<int64_t>(blockIdx.y) * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t weight_row = min(at, job.num_outputs - 1);  // the other half of a warp needs this one
  int64_t offsets[kTokenTile];
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) offsets[i] = static_cast<int64_t>(work.first_row + i) * job.in;
  float sums[kTokenTile];
  const Values x{const_cast<uint16_t*>(job.x), true};
  dot_tile(WeightRow<kFormat>(work.data, work.scales, job.in, weight_row), x, offsets, work.count, job.in, sums);
  if (at >= job.num_outputs || threadIdx.x % kLanes != 0) return;
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) {
    if (i >= work.count) break;
    const int64_t row = work.first_row + i;
    const float factor = job.factors == nullptr ? 1.0f : job.factors[row];
    job.out.store(row * job.num_outputs + weight_row, sums[i] * (factor * work.tensor_scale));
  }
}
static_assert(kTokenTile == kTileTokens);

Job begin(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, device::Queue& queue) {
  Scratch scratch{};
  layout_scratch(desc, args.num_rows, args.workspace, scratch);
  group_rows(desc, args, kTileTokens, kTileTokens, scratch.groups, queue);
  const uint16_t* x = round_group_inputs(desc, args, scratch.groups, scratch.inputs, queue);
  return {scratch.groups,
          x,
          scratch.inputs.factors,
          values_of(args.out),
          desc.in,
          desc.out,
          FastDivisor(static_cast<uint32_t>(ceil_div<int64_t>(desc.out, kTileRows)))};
}

// A grid of entries of work by parts of the weight rows.
dim3 grid_of(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int64_t part_rows) {
  return dim3(static_cast<unsigned>(most_row_work(desc, num_rows, kTileTokens)),
              static_cast<unsigned>(ceil_div(desc.out, part_rows)));
}

}  // namespace

int64_t grouped_linear_workspace(const ops::GroupedLinear::Desc& desc, int64_t max_rows) {
  Scratch scratch{};
  return layout_scratch(desc, max_rows, nullptr, scratch);
}

bool grouped_linear_packed_supports(const ops::GroupedLinear::Desc& desc, std::string& why_not) {
  if (!ops::grouped_linear_reference_supports(desc, why_not)) return false;
  if (can_stream(desc.in)) return true;
  why_not = "the input width is not a multiple of 128";
  return false;
}

// What `linear` takes tensor cores for: rounded inputs only where weights are packed.
bool grouped_linear_mma_supports(const ops::GroupedLinear::Desc& desc, std::string& why_not) {
  if (!ops::grouped_linear_reference_supports(desc, why_not)) return false;
  if (desc.input == ops::InputMode::kA16) return true;
  why_not = "inputs are not plain BF16 (a16)";
  return false;
}

void grouped_linear_packed(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                           device::Queue& queue) {
  if (args.num_rows == 0) return;
  const Job job = begin(desc, args, queue);
  const int64_t num_tiles = most_row_work(desc, args.num_rows, kTileTokens) * job.row_tiles.divisor();
  using Ring = PackedRing<kFormat, kPackedStages, Tiles>;
  StreamShape shape = stream_shape(desc.in, num_tiles, 1);
  const auto bytes = [&] { return shape.shared_bytes(kPackedStages, Ring::kBytes, 1); };
  // Where shared memory is short (99 KB of compute capability 8.6): smaller blocks.
  if (bytes() > most_shared_bytes()) shape.block_tiles = 1;
  while (bytes() > most_shared_bytes() && shape.tile_warps > 1) shape.tile_warps /= 2;
  launch("grouped_stream", queue, grouped_stream<Ring>, dim3(shape.blocks(num_tiles)), shape.threads(), bytes(), job,
         shape);
}

void grouped_linear_mma(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                        device::Queue& queue) {
  if (args.num_rows == 0) return;
  launch("grouped_mma", queue, grouped_mma, grid_of(desc, args.num_rows, kTileRows), threads_for(desc.in), 0,
         begin(desc, args, queue));
}

void grouped_linear(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, device::Queue& queue) {
  if (args.num_rows == 0) return;
  launch("grouped_simple", queue, grouped_simple, grid_of(desc, args.num_rows, kRowsPerBlock), kRowsPerBlock * kLanes,
         0, begin(desc, args, queue));
}

}  // namespace tessera::backends::cuda
