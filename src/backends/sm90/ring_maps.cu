// SPDX-License-Identifier: Apache-2.0
// linear and linear_group of few tokens by unit_ring.cuh. What bounds them: the read of the weights, copies of which
// begin before the kernel before has ended.
#include "backends/sm90/ring_maps.h"

#include <algorithm>

#include "backends/cuda/group_tiles.cuh"
#include "backends/cuda/linear_tiles.cuh"
#include "backends/sm90/unit_ring.cuh"
#include "base/env.h"
#include "base/error.h"

namespace tessera::backends::sm90 {

namespace {

using Share = UnitStage<1>::Share;

template <int kTokens, class Tiles, class Job>
__global__ void __launch_bounds__(RingPlan<kTokens>::kThreads, 1)
    ring_maps(const __grid_constant__ Job job, RingShape shape, int num_tiles) {
  auto& s = *cuda_common::dynamic_shared<UnitRing<kTokens>>();
  s.init();
  __syncthreads();
  const Tiles tiles(job);
  const RingRange range(num_tiles);
  if (is_copying_warp()) return copy_units(shape, range, tiles, s);
  cuda_common::wait_for_previous();
  ring_tiles(shape, range, tiles, s);
}

// num_tiles: of all tokens.
template <class Tiles, class Job>
void launch_ring(const char* name, const device::Queue& queue, const Job& job, int64_t num_tiles) {
  const auto start = [&](auto tokens) {
    using Ring = UnitRing<tokens.value>;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles, cuda_common::multiprocessors()));
    cuda_common::launch(name, queue, ring_maps<tokens.value, Tiles, Job>, dim3(blocks), Ring::kThreads, sizeof(Ring),
                        job, RingShape(job.in, Tiles::kPasses, Ring::kRoundUnits), static_cast<int>(num_tiles));
  };
  if (job.num_tokens == 1) return start(std::integral_constant<int, 1>());
  start(std::integral_constant<int, cuda_common::kTileTokens>());
}

}  // namespace

int64_t most_ring_tokens() {
  const std::string value = env_value("TESSERA_UNIT_RING").value_or("1");
  if (value != "0" && value != "1" && value != "8") {
    fail(ErrorCode::kInvalidArgument, "TESSERA_UNIT_RING: expected 0, 1 or 8");
  }
  return value.front() - '0';
}

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
