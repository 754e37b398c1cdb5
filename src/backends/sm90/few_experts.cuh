// SPDX-License-Identifier: Apache-2.0
#pragma once
// Both maps of experts of few tokens in one kernel, by the teams of few_sums.cuh and with its bits: a team that finds
// no more tiles of gate and up goes on with those of down, whose first weights it copies while other teams finish h. As
// two kernels every multiprocessor would wait for the slowest one, and fill its rings anew.
//   claims    tiles are numbered, gate and up's first, by entry of work; a team takes the next one that nobody has. So
//             who waits, does so for tiles of teams that are at work and wait for nothing: blocks need not all be there
//   progress  of an entry of work: warps that have stored their part of h. What is copied of h is complete
// Grouping has set both to zero.
#include <cstdint>

#include "backends/cuda_common/ptx/progress.cuh"
#include "backends/sm90/few_sums.cuh"
#include "backends/sm90/moe_tiles.cuh"

namespace tessera::backends::sm90 {

struct FewExpertsShared {
  Few::Shared rings;
  int32_t tiles[Few::kTeams][Few::kStages];  // whose first chunk the stage has; kNoTile: there are no more
};

// Both maps' tiles under one number.
template <class DownTiles, class Job>
class FewExpertTiles {
 public:
  static constexpr int kNoTile = -1;

  __device__ explicit FewExpertTiles(const Job& job)
      : job_(job), gate_and_up_(job), down_(job), num_first_(gate_and_up_.count()) {}

  // The next one that nobody has.
  __device__ int claim() const {
    const int tile = static_cast<int>(atomicAdd(job_.scratch.progress, 1u));
    return tile < num_first_ + down_.count() ? tile : kNoTile;
  }

  __device__ void copy(int tile, FewCopier& copier, Few::Shared& s) const {
    if (tile < num_first_) return copier.copy(gate_and_up_, gate_and_up_.place(tile), s, [] {});
    const auto place = down_.place(tile - num_first_);
    copier.copy(down_, place, s, [&] {
      ptx::wait_for_progress(progress_of(place), static_cast<uint32_t>(gate_and_up_.row_tiles() * Few::kSlots));
    });
  }

  __device__ void sum(int tile, FewConsumer& consumer, Few::Shared& s) const {
    if (tile >= num_first_) return consumer.sum(down_, down_.place(tile - num_first_), s);
    const auto place = gate_and_up_.place(tile);
    consumer.sum(gate_and_up_, place, s);
    __syncwarp();
    if (consumer.lane == 0) ptx::add_progress(progress_of(place));
  }

 private:
  __device__ uint32_t* progress_of(const WorkTiles::Place& place) const {
    return job_.scratch.progress + kFirstProgress + (place.work - job_.scratch.work);
  }

  const Job& job_;
  const GateAndUpTiles<Few> gate_and_up_;
  const DownTiles down_;
  const int num_first_;
};

template <class DownTiles, class Job>
__global__ void __launch_bounds__(Few::kThreads, 1) few_experts(Job job) {
  using Tiles = FewExpertTiles<DownTiles, Job>;
  FewExpertsShared& shared = *cuda_common::swizzled_shared<FewExpertsShared>();
  Few::Shared& s = shared.rings;
  init_few(s);
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  if (is_few_copier()) {
    FewCopier copier;
    const bool is_first = copier.lane == 0;
    const auto of_warp = [](int tile) { return __shfl_sync(~0u, tile, 0); };
    // A tile's number lies with its first chunk, for the consumers.
    for (int tile = of_warp(is_first ? tiles.claim() : 0);;) {
      s.free[copier.team][copier.at.stage].wait(copier.at.parity ^ 1);
      if (is_first) shared.tiles[copier.team][copier.at.stage] = tile;
      __syncwarp();
      if (tile == Tiles::kNoTile) break;
      const int next = is_first ? tiles.claim() : 0;  // on its way while the tile is copied
      tiles.copy(tile, copier, s);
      tile = of_warp(next);
    }
    if (is_first) s.full[copier.team][copier.at.stage].arrive();
  } else {
    FewConsumer consumer;
    for (;;) {
      s.full[consumer.team][consumer.at.stage].wait(consumer.at.parity);
      const int tile = shared.tiles[consumer.team][consumer.at.stage];
      if (tile == Tiles::kNoTile) break;
      tiles.sum(tile, consumer, s);
    }
  }
}

template <class DownTiles, class Job>
void launch_few_experts(const ops::MoeExperts::Desc& desc, const Job& job, const device::Queue& queue) {
  const int64_t work = most_work(desc, job.num_slots, job.work_slots);
  const int64_t tiles = work * (ceil_div<int64_t>(desc.inner, GateAndUpTiles<Few>::kRows) +
                                ceil_div<int64_t>(desc.hidden, DownTiles::kRows));
  const auto blocks = std::min<int64_t>(ceil_div<int64_t>(tiles, Few::kTeams), cuda_common::multiprocessors());
  cuda_common::launch("few_experts", queue, few_experts<DownTiles, Job>, dim3(static_cast<unsigned>(blocks)),
                      Few::kThreads, sizeof(FewExpertsShared), job);
}

}  // namespace tessera::backends::sm90
