// SPDX-License-Identifier: Apache-2.0
// linear and linear_group of one token, and of FP8 of up to eight, by unit_ring.cuh. What bounds them: the read of the
// weights, copies of which begin before the kernel before has ended.
#include "backends/sm90/ring_maps.h"

#include <algorithm>

#include "backends/cuda/group_tiles.cuh"
#include "backends/cuda/linear_tiles.cuh"
#include "backends/sm90/unit_ring.cuh"

namespace tessera::backends::sm90 {

namespace {

template <int kTokens, class Weights, class Tiles, class Job>
__global__ void __launch_bounds__(RingPlan<kTokens>::kThreads, 1)
    ring_maps(const __grid_constant__ Job job, RingShape shape, int num_tiles) {
  auto& s = *cuda_common::dynamic_shared<UnitRing<kTokens, Weights>>();
  s.init();
  __syncthreads();
  const Tiles tiles(job);
  const RingRange<Weights::kStages> range(num_tiles);
  if (is_copying_warp()) return copy_units(shape, range, tiles, s, 0, range.place(units_of(shape, range)));
  cuda_common::wait_for_previous();
  ring_tiles<true>(shape, range, tiles, s);
}

template <int kTokens, class Weights, class Tiles, class Job>
void launch_ring(const char* name, const device::Queue& queue, const Job& job, int64_t num_tiles) {
  using Ring = UnitRing<kTokens, Weights>;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles, cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, ring_maps<kTokens, Weights, Tiles, Job>, dim3(blocks), Ring::kThreads, sizeof(Ring),
                      job, RingShape(job.in, Tiles::kPasses, Ring::kRoundUnits), static_cast<int>(num_tiles));
}

// Calls with(RingWeights, std::integral_constant<int, tokens of a tile>).
template <class With>
void with_ring(ops::WeightFormat format, int64_t num_tokens, const With& with) {
  using One = std::integral_constant<int, 1>;
  if (format != ops::WeightFormat::kFp8Block) return with(RingNvfp4(), One());
  if (num_tokens == 1) return with(RingFp8(), One());
  with(RingFp8(), std::integral_constant<int, cuda_common::kTileTokens>());
}

}  // namespace

void linear_ring(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  with_ring(desc.format, args.num_tokens, [&]<class Weights>(Weights, auto tokens) {
    launch_ring<tokens.value, Weights, cuda::linear_tiles::Tiles<typename Weights::Share>>(
        "linear_ring", queue, cuda::linear_tiles::job_of(desc, args),
        desc.groups * ceil_div<int64_t>(desc.out, cuda_common::kTileRows));
  });
}

void linear_group_ring(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  namespace group_tiles = cuda::group_tiles;
  const group_tiles::Job job = group_tiles::job_of(desc, args);
  const int num_tiles = group_tiles::row_tiles_of(desc, job);
  with_ring(desc.maps.front().format, args.num_tokens, [&]<class Weights>(Weights, auto tokens) {
    using Share = typename Weights::Share;
    if (desc.swiglu) {
      launch_ring<tokens.value, Weights, group_tiles::GatedTiles<Share>>("linear_group_ring", queue, job, num_tiles);
    } else {
      launch_ring<tokens.value, Weights, group_tiles::MapTiles<Share>>("linear_group_ring", queue, job, num_tiles);
    }
  });
}

}  // namespace tessera::backends::sm90
