// SPDX-License-Identifier: Apache-2.0
// linear on tensor cores. What and bound: at few tokens the weights are read once at the memory's speed; then they
// stream through shared memory, once for each 8 tokens (weight_stream.cuh, cuda_common/stream_limit.h); for more tokens
// they are loaded into registers tile by tile. The sums are the same. Weights are packed for it (linear_packed), those
// of odd widths are as in the checkpoint.
#include "backends/cuda/kernels.h"
#include "backends/cuda/linear_tiles.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/packed_ring.cuh"
#include "backends/cuda_common/stream_limit.h"
#include "backends/cuda_common/weight_ring.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using namespace linear_tiles;

// Where weights come from: the lanes' shares of 16 rows in registers, and the ring of those that stream.
template <ops::WeightFormat kFormat>
struct FromCheckpoint {
  using Share = WeightShare<kFormat>;

  // Rows [first_row, first_row + 16) of a group; those that aren't there are the last one again.
  __device__ static CheckpointRows<kFormat> rows(const Job& job, int64_t group, int64_t first_row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    CheckpointRows<kFormat> weight{job.data, job.scales, job.in, {}};
#pragma unroll
    for (int r = 0; r < 2; ++r) weight.rows[r] = group * job.out + min(first_row + lane / 4 + 8 * r, job.out - 1);
    return weight;
  }
};
template <ops::WeightFormat kWeightFormat>
struct StreamFromCheckpoint : FromCheckpoint<kWeightFormat> {
  static constexpr ops::WeightFormat kFormat = kWeightFormat;
  template <int kStages, class Tiles>
  using Ring = WeightRing<kFormat, kStages, Tiles>;
  static constexpr int kFew = kFewStages<kFormat>;
};
template <ops::WeightFormat kWeightFormat>
struct FromPacked {
  static constexpr ops::WeightFormat kFormat = kWeightFormat;
  using Share = PackedShare<kFormat>;
  __device__ static PackedRows<kFormat> rows(const Job& job, int64_t group, int64_t first_row) {
    return {job.data, job.scales, group * job.out + first_row, job.in};
  }
  template <int kStages, class Tiles>
  using Ring = PackedRing<kFormat, kStages, Tiles>;
  static constexpr int kFew = kPackedStages;
};

// Grid: tiles of 16 rows, group by group; by tiles of 8 * kTiles tokens. A warp per chunk at a time.
template <class Source, int kTiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp) linear_mma_kernel(Job job) {
  wait_for_previous();
  __shared__ float s_parts[kMaxWarps][kTiles * kTileSums];  // chunk sums, as lanes hold them
  __shared__ float s_sums[kTiles * kTileSums];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t num_rows = job.groups * job.out, group = job.tiles_per_group.quotient(blockIdx.x);
  const int64_t first_row = (blockIdx.x - group * job.tiles_per_group.divisor()) * kTileRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (kTiles * kTileTokens);

  Operands<kTiles> operands;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t token = first_token + tile * kTileTokens + lane / 4;
    operands.x[tile] = token < job.num_tokens ? job.x + (token * job.groups + group) * job.in : nullptr;
  }

  sum_tile(Source::rows(job, group, first_row), operands, s_parts, s_sums);

  for (int at = static_cast<int>(threadIdx.x); at < kTiles * kTileSums; at += static_cast<int>(blockDim.x)) {
    const int64_t row = first_row + row_of_sum(at), token = first_token + token_of_sum(at);
    if (row >= job.out || token >= job.num_tokens) continue;
    job.y.store(token * num_rows + group * job.out + row, s_sums[at] * Source::Share::kFactor * job.tensor_scale);
  }
}

template <class Source, int kStages>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2) linear_stream_kernel(Job job, StreamShape shape, int num_tiles) {
  using AllTiles = Tiles<typename Source::Share>;
  const AllTiles tiles(job);
  float* s_sums = dynamic_shared<float>();  // then the rings
  typename Source::template Ring<kStages, AllTiles> ring(shape, num_tiles, tiles,
                                                         reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(1)));
  wait_for_previous();
  stream_tiles(shape, num_tiles, tiles, ring, s_sums);
}

// Few tokens. False: not this width, or not on this GPU.
template <class Source>
bool launch_stream(const Job& job, unsigned row_tiles, device::Queue& queue) {
  if (!can_stream(job.in)) return false;
  const unsigned num_tiles = row_tiles * job.token_tiles.divisor();
  const StreamShape shape = stream_shape(job.in, num_tiles, 1);
  const unsigned blocks = shape.blocks(num_tiles);
  constexpr int kStageBytes = Source::template Ring<2, Tiles<typename Source::Share>>::kBytes;  // whatever their number
  const auto bytes = [&](int stages) { return shape.shared_bytes(stages, kStageBytes, 1); };
  if (bytes(Source::kFew) > most_shared_bytes()) return false;
  const auto start = [&](auto kernel, int stages) {
    launch("linear_stream", queue, kernel, dim3(blocks), shape.threads(), bytes(stages), job, shape,
           static_cast<int>(num_tiles));
  };
  if (Source::kFew < kManyStages && static_cast<int>(blocks) <= multiprocessors() &&
      bytes(kManyStages) <= most_shared_bytes()) {
    start(linear_stream_kernel<Source, kManyStages>, kManyStages);
  } else {
    start(linear_stream_kernel<Source, Source::kFew>, Source::kFew);
  }
  return true;
}

template <class Source>
void launch_for(const Job& job, device::Queue& queue) {
  const unsigned row_tiles = static_cast<unsigned>(job.groups * ceil_div<int64_t>(job.out, kTileRows));
  if constexpr (requires { Source::kFew; }) {
    if (streams_tokens(Source::kFormat, 1, row_tiles, job.in, job.num_tokens) &&
        launch_stream<Source>(job, row_tiles, queue)) {
      return;
    }
  }
  const auto start = [&](auto kernel, int64_t tokens) {
    const dim3 grid(row_tiles, static_cast<unsigned>(ceil_div(job.num_tokens, tokens)));
    launch("linear_mma", queue, kernel, grid, threads_for(job.in), 0, job);
  };
  if (job.num_tokens <= kTileTokens) {
    start(linear_mma_kernel<Source, 1>, kTileTokens);
  } else if (job.num_tokens <= 2 * kTileTokens) {
    start(linear_mma_kernel<Source, 2>, 2 * kTileTokens);
  } else {
    start(linear_mma_kernel<Source, 4>, 4 * kTileTokens);
  }
}

}  // namespace

bool linear_mma_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  if (desc.input != ops::InputMode::kA16 || desc.activation != DType::kBF16) {
    why_not = "inputs are not plain BF16 (a16)";
  } else if (desc.format == ops::WeightFormat::kF32) {
    why_not = "weights are FP32";
  } else if (desc.in % 16 != 0) {
    why_not = "the input width is not a multiple of 16";
  } else {
    return true;
  }
  return false;
}

void linear_mma(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const Job job = job_of(desc, args);
  switch (desc.format) {
    case ops::WeightFormat::kNvfp4:
      return launch_for<FromCheckpoint<ops::WeightFormat::kNvfp4>>(job, queue);
    case ops::WeightFormat::kFp8Block:
      return launch_for<StreamFromCheckpoint<ops::WeightFormat::kFp8Block>>(job, queue);
    case ops::WeightFormat::kBf16:
      return launch_for<StreamFromCheckpoint<ops::WeightFormat::kBf16>>(job, queue);
    case ops::WeightFormat::kF32:
      break;  // declined
  }
}

bool linear_packed_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  if (!can_stream(desc.in) || (desc.groups > 1 && desc.out % kTileRows != 0)) {
    why_not = "the input width is not a multiple of 128, or a group's outputs are none of 16";
  } else {
    return linear_mma_supports(desc, why_not);
  }
  return false;
}

void linear_packed(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const Job job = job_of(desc, args);
  switch (desc.format) {
    case ops::WeightFormat::kNvfp4:
      return launch_for<FromPacked<ops::WeightFormat::kNvfp4>>(job, queue);
    case ops::WeightFormat::kFp8Block:
      return launch_for<FromPacked<ops::WeightFormat::kFp8Block>>(job, queue);
    case ops::WeightFormat::kBf16:
      return launch_for<FromPacked<ops::WeightFormat::kBf16>>(job, queue);
    case ops::WeightFormat::kF32:
      break;  // declined
  }
}

}  // namespace tessera::backends::cuda
