// SPDX-License-Identifier: Apache-2.0
// linear_group on tensor cores: for few tokens the tiles of all maps stream through one launch (weight_stream.cuh), so
// that narrow maps share the GPU and wait for their input once; of gate and up a tile has both, and stores their
// activation. More tokens (cuda_common/stream_limit.h): the maps one by one. The sums are those of linear_mma.cu.
#include <type_traits>

#include "backends/cuda/group_tiles.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/packed_ring.cuh"
#include "backends/cuda_common/stream_limit.h"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using namespace group_tiles;

template <class Ring, class Tiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2)
    linear_group_kernel(const __grid_constant__ Job job, StreamShape shape, int num_tiles) {
  const Tiles tiles(job);
  float* s_sums = dynamic_shared<float>();  // then the rings
  Ring ring(shape, num_tiles, tiles, reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(Tiles::kPasses)));
  wait_for_previous();
  stream_tiles(shape, num_tiles, tiles, ring, s_sums);
}

// False: not on this GPU.
template <ops::WeightFormat kFormat, class Tiles>
bool stream(const Job& job, int row_tiles, device::Queue& queue) {
  const int num_tiles = row_tiles * static_cast<int>(job.token_tiles.divisor());
  const StreamShape shape = stream_shape(job.in, num_tiles, Tiles::kPasses);
  const unsigned blocks = shape.blocks(num_tiles);
  const auto start = [&](auto stages) {
    using Ring = PackedRing<kFormat, stages.value, Tiles>;
    const size_t bytes = shape.shared_bytes(stages.value, Ring::kBytes, Tiles::kPasses);
    if (bytes > most_shared_bytes()) return false;
    launch("linear_group", queue, linear_group_kernel<Ring, Tiles>, dim3(blocks), shape.threads(), bytes, job, shape,
           num_tiles);
    return true;
  };
  // Longer rings where blocks are few, as linear_mma.cu has them.
  if (static_cast<int>(blocks) <= multiprocessors() && start(std::integral_constant<int, kManyStages>())) return true;
  return start(std::integral_constant<int, kPackedStages>());
}

template <ops::WeightFormat kFormat>
bool stream_maps(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  using Share = PackedShare<kFormat>;
  const Job job = job_of(desc, args);
  if (desc.swiglu) return stream<kFormat, GatedTiles<Share>>(job, row_tiles_of(desc, job), queue);
  return stream<kFormat, MapTiles<Share>>(job, row_tiles_of(desc, job), queue);
}

}  // namespace

bool linear_group_packed_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  if (!ops::linear_group_reference_supports(desc, why_not)) return false;
  if (desc.norm) {
    why_not = "the norm is a kernel of its own";
    return false;
  }
  for (const ops::Linear::Desc& map : desc.maps) {
    if (!linear_packed_supports(map, why_not)) return false;
  }
  return true;
}

bool linear_group_stream(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return true;
  int64_t row_tiles = 0;
  for (const ops::Linear::Desc& map : desc.maps) row_tiles += ceil_div<int64_t>(map.out, kTileRows);
  const ops::Linear::Desc& first = desc.maps.front();
  if (!streams_tokens(first.format, std::ssize(desc.maps), row_tiles, first.in, args.num_tokens)) return false;
  switch (first.format) {
    case ops::WeightFormat::kNvfp4:
      return stream_maps<ops::WeightFormat::kNvfp4>(desc, args, queue);
    case ops::WeightFormat::kFp8Block:
      return stream_maps<ops::WeightFormat::kFp8Block>(desc, args, queue);
    case ops::WeightFormat::kBf16:
      return stream_maps<ops::WeightFormat::kBf16>(desc, args, queue);
    case ops::WeightFormat::kF32:
      break;  // declined
  }
  return false;
}

void linear_group_packed(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (!linear_group_stream(desc, args, queue)) ops::run_parts(desc, args, queue, linear_packed, swiglu);
}

}  // namespace tessera::backends::cuda
