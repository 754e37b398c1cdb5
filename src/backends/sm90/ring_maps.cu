// SPDX-License-Identifier: Apache-2.0
// linear and linear_group of one token by unit_ring.cuh. What bounds them: the read of the weights, copies of which
// begin before the kernel before has ended.
#include "backends/sm90/ring_maps.h"

#include <algorithm>

#include "backends/cuda/group_tiles.cuh"
#include "backends/cuda/linear_tiles.cuh"
#include "backends/sm90/unit_ring.cuh"

namespace tessera::backends::sm90 {

namespace {

using Share = UnitStage<1>::Share;

template <class Tiles, class Job>
__global__ void __launch_bounds__(RingPlan<1>::kThreads, 1)
    ring_maps(const __grid_constant__ Job job, RingShape shape, int num_tiles) {
  auto& s = *cuda_common::dynamic_shared<UnitRing<1>>();
  s.init();
  __syncthreads();
  const Tiles tiles(job);
  const RingRange range(num_tiles);
  if (is_copying_warp()) return copy_units(shape, range, tiles, s, 0, units_of(shape, range));
  cuda_common::wait_for_previous();
  ring_tiles(shape, range, tiles, s);
}

template <class Tiles, class Job>
void launch_ring(const char* name, const device::Queue& queue, const Job& job, int64_t num_tiles) {
  using Ring = UnitRing<1>;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles, cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, ring_maps<Tiles, Job>, dim3(blocks), Ring::kThreads, sizeof(Ring), job,
                      RingShape(job.in, Tiles::kPasses, Ring::kRoundUnits), static_cast<int>(num_tiles));
}

}  // namespace

void linear_ring(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  launch_ring<cuda::linear_tiles::Tiles<Share>>("linear_ring", queue, cuda::linear_tiles::job_of(desc, args),
                                                desc.groups * ceil_div<int64_t>(desc.out, cuda_common::kTileRows));
}

void linear_group_ring(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  namespace group_tiles = cuda::group_tiles;
  const group_tiles::Job job = group_tiles::job_of(desc, args);
  const int num_tiles = group_tiles::row_tiles_of(desc, job);
  if (desc.swiglu) return launch_ring<group_tiles::GatedTiles<Share>>("linear_group_ring", queue, job, num_tiles);
  launch_ring<group_tiles::MapTiles<Share>>("linear_group_ring", queue, job, num_tiles);
}

}  // namespace tessera::backends::sm90
