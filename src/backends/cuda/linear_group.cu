// SPDX-License-Identifier: Apache-2.0
// linear_group on tensor cores: for few tokens the tiles of all maps stream through one launch (weight_stream.cuh), so
// that narrow maps share the GPU and wait for their input once; of gate and up a tile has both, and stores their
// activation. Of two formats each has blocks of its own in that launch. More tokens (cuda_common/stream_limit.h): the
// maps one by one. The sums are those of linear_mma.cu.
#include <algorithm>
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

// Maps of one format and the blocks that they have, of a launch that others share.
struct Part {
  Job job;
  int num_tiles, num_blocks;
};

template <ops::WeightFormat kFormat>
using MapsOf = MapTiles<PackedShare<kFormat>>;
template <ops::WeightFormat kFormat>
using RingOf = PackedRing<kFormat, kPackedStages, MapsOf<kFormat>>;

template <ops::WeightFormat kFormat>
__device__ void stream_part(const Part& part, const StreamShape& shape, int first_block) {
  const StreamBlocks blocks{static_cast<int>(blockIdx.x) - first_block, part.num_blocks};
  const MapsOf<kFormat> tiles(part.job);
  float* s_sums = dynamic_shared<float>();  // then the rings
  RingOf<kFormat> ring(shape, part.num_tiles, tiles, reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(1)), blocks);
  wait_for_previous();
  stream_tiles(shape, part.num_tiles, tiles, ring, s_sums, blocks);
}

// Grid: the blocks of `packed`, then those of `bf16`.
template <ops::WeightFormat kFormat>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2)
    linear_group_of_two(const __grid_constant__ Part packed, const __grid_constant__ Part bf16, StreamShape shape) {
  if (static_cast<int>(blockIdx.x) < packed.num_blocks) {
    stream_part<kFormat>(packed, shape, 0);
  } else {
    stream_part<ops::WeightFormat::kBf16>(bf16, shape, packed.num_blocks);
  }
}

// False: not on this GPU, or more blocks than one round of two to a multiprocessor, where some would have done with one
// format's tiles while others have the other's before them. (A GPU with 100 KB of shared memory has one at a time.)
template <ops::WeightFormat kFormat>
bool stream_two(Part packed, Part bf16, device::Queue& queue) {
  const StreamShape shape = stream_shape(packed.job.in, packed.num_tiles + bf16.num_tiles, 1);
  for (Part* part : {&packed, &bf16}) part->num_blocks = ceil_div(part->num_tiles, shape.block_tiles);
  const int blocks = packed.num_blocks + bf16.num_blocks;
  constexpr int kStageBytes = std::max(RingOf<kFormat>::kBytes, RingOf<ops::WeightFormat::kBf16>::kBytes);
  const size_t bytes = shape.shared_bytes(kPackedStages, kStageBytes, 1);
  if (blocks > kStreamBlocksAtOnce * multiprocessors() || bytes > most_shared_bytes()) return false;
  launch("linear_group", queue, linear_group_of_two<kFormat>, dim3(static_cast<unsigned>(blocks)), shape.threads(),
         bytes, packed, bf16, shape);
  return true;
}

// False: the parts by themselves.
bool stream_formats(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  Part packed{}, bf16{};
  ops::WeightFormat format = ops::WeightFormat::kNvfp4;
  for (const ops::LinearGroup::Part& of_format : desc.parts) {
    const Job job = job_of(of_format.desc, of_format.args_of(args));
    const int row_tiles = row_tiles_of(of_format.desc, job);
    const ops::WeightFormat its_format = of_format.desc.maps.front().format;
    if (!streams_tokens(its_format, std::ssize(of_format.members), row_tiles, job.in, args.num_tokens)) return false;
    const bool is_bf16 = its_format == ops::WeightFormat::kBf16;
    if (!is_bf16) format = its_format;
    (is_bf16 ? bf16 : packed) = {job, row_tiles * static_cast<int>(job.token_tiles.divisor()), 0};
  }
  return format == ops::WeightFormat::kNvfp4 ? stream_two<ops::WeightFormat::kNvfp4>(packed, bf16, queue)
                                             : stream_two<ops::WeightFormat::kFp8Block>(packed, bf16, queue);
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
  const auto num_bf16 = std::ranges::count(desc.maps, ops::WeightFormat::kBf16, &ops::Linear::Desc::format);
  if (!desc.parts.empty() && (num_bf16 == 0 || desc.parts.size() != 2)) {
    why_not = "maps of one format, or of BF16 and one other";
    return false;
  }
  return true;
}

bool linear_group_stream(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return true;
  if (!desc.parts.empty()) return stream_formats(desc, args, queue);
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
  if (linear_group_stream(desc, args, queue)) return;
  if (desc.parts.empty()) return ops::run_parts(desc, args, queue, linear_packed, swiglu);
  for (const ops::LinearGroup::Part& part : desc.parts) linear_group_packed(part.desc, part.args_of(args), queue);
}

}  // namespace tessera::backends::cuda
