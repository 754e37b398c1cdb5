// SPDX-License-Identifier: Apache-2.0
// moe_experts of a few slots by unit_ring.cuh: gate and up, then down, whose blocks list the slots themselves. What
// bounds it: the read of the chosen experts' weights.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/expert_tiles.cuh"
#include "backends/sm90/ring_maps.h"
#include "backends/sm90/unit_ring.cuh"

namespace tessera::backends::sm90 {

namespace {

namespace expert_tiles = cuda::expert_tiles;
using Share = UnitStage<1>::Share;

template <int kTokens>
struct ExpertRing {
  UnitRing<kTokens> ring;
  expert_tiles::OwnList list;
};

// Down's weights are copied before its wait, as experts_mma (cuda/moe.cu) does and for its reasons.
template <int kTokens, class Tiles>
__global__ void __launch_bounds__(RingPlan<kTokens>::kThreads, 1)
    ring_experts(expert_tiles::Job job, RingShape shape, cuda_common::FastDivisor row_tiles) {
  auto& s = *cuda_common::dynamic_shared<ExpertRing<kTokens>>();
  s.ring.init();
  if constexpr (Tiles::kIsFirst) {
    expert_tiles::prefetch_matrices(job);
    cuda_common::wait_for_previous();
  }
  const Tiles tiles(job, expert_tiles::work_of<kTokens>(job, s.list), row_tiles);
  const RingRange range(tiles.count());
  const auto zero_foreign = [&] {
    for (int64_t slot = blockIdx.x; slot < job.num_slots; slot += gridDim.x) expert_tiles::zero_if_foreign(job, slot);
  };
  if (is_copying_warp()) {
    copy_units(shape, range, tiles, s.ring);
    if constexpr (Tiles::kIsFirst) zero_foreign();
    return;
  }
  if constexpr (Tiles::kIsFirst) {
    zero_foreign();  // while the first units are on their way
  } else {
    cuda_common::wait_for_previous();
  }
  ring_tiles(shape, range, tiles, s.ring);
}

template <int kTokens>
void run(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  expert_tiles::Job job{};
  expert_tiles::begin(desc, args, true, queue, job);
  const auto start = [&](const char* name, auto all, int64_t width, int64_t rows) {
    using Tiles = typename decltype(all)::type;
    using Ring = ExpertRing<kTokens>;
    const cuda_common::FastDivisor row_tiles(static_cast<uint32_t>(rows / cuda_common::kTileRows));
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>(job.num_slots * row_tiles.divisor(), cuda_common::multiprocessors()));
    cuda_common::launch(name, queue, ring_experts<kTokens, Tiles>, dim3(blocks), RingPlan<kTokens>::kThreads,
                        sizeof(Ring), job, RingShape(width, Tiles::kPasses, RingPlan<kTokens>::kRoundUnits), row_tiles);
  };
  start("gate_and_up_ring", std::type_identity<expert_tiles::GateAndUpTiles<Share>>(), desc.hidden, desc.inner);
  expert_tiles::round_h(desc, args, DType::kBF16, job, queue);
  start("down_ring", std::type_identity<expert_tiles::DownTiles<Share>>(), desc.inner, desc.hidden);
}

}  // namespace

void moe_experts_ring(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 1) return run<1>(desc, args, queue);
  run<cuda_common::kTileTokens>(desc, args, queue);
}

}  // namespace tessera::backends::sm90
