// SPDX-License-Identifier: Apache-2.0
// moe_experts of a few slots by unit_ring.cuh: gate and up, then down, whose blocks list the slots themselves; and
// all_experts, where both launches have the shared expert's tiles too. What bounds it: the read of the weights.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/expert_tiles.cuh"
#include "backends/sm90/all_expert_tiles.cuh"
#include "backends/sm90/ring_maps.h"
#include "backends/sm90/unit_ring.cuh"

namespace tessera::backends::sm90 {

namespace {

namespace expert_tiles = cuda::expert_tiles;
using Share = RingNvfp4::Share;
using ops::WeightFormat;

template <int kTokens>
struct ExpertRing {
  UnitRing<kTokens> ring;
  expert_tiles::OwnList list;
};

__device__ const expert_tiles::Job& routed_of(const expert_tiles::Job& job) {
  return job;
}
__device__ const expert_tiles::Job& routed_of(const AllExpertsJob& job) {
  return job.routed;
}

// A block's tiles where the shared expert's come first, since they are known before others are: they are dealt out for
// themselves, and others so that a block has as many tiles in all as any other or one more. Of an FP8 shared expert
// (others' are NVFP4) a unit takes two places.
template <WeightFormat kFormat>
struct SharedFirstRange {
  static constexpr bool kHasGuests = kFormat != WeightFormat::kNvfp4;
  using Guests = std::conditional_t<kHasGuests, RingFp8Halves, RingNvfp4>;
  RingRange<> shared;
  int count, others;  // of all; the first of the others, less the place that it has here
  int num_shared_units;

  __device__ SharedFirstRange(const RingShape& shape, int num_shared, int num_tiles) : shared(num_shared) {
    const RingRange<> all(num_tiles);
    count = all.count, others = num_shared + all.first - shared.first - shared.count;
    num_shared_units = units_of(shape, shared);
  }
  // The shared expert's places that the ring has stages for.
  template <class Ring>
  __device__ int num_first() const {
    return min(num_shared_units * Guests::kStages, Ring::kStages);
  }
  __device__ int tile(int local) const { return local < shared.count ? shared.first + local : others + local; }
  __device__ bool is_guest(int unit) const { return unit < num_shared_units; }
  __device__ int place(int unit) const { return unit + min(unit, num_shared_units) * (Guests::kStages - 1); }
  __device__ RingPart part_at(int place) const {
    if (place >= num_shared_units * Guests::kStages) return {place - num_shared_units * (Guests::kStages - 1), 0};
    return {place / Guests::kStages, place % Guests::kStages};
  }
};

// Down's weights are copied before its wait, as experts_mma (cuda/moe.cu) does and for its reasons; of gate and up
// those of the shared expert, as many as the ring holds.
template <int kTokens, bool kAreWhole, class Tiles, class Job>
__global__ void __launch_bounds__(RingPlan<kTokens>::kThreads, 1)
    ring_experts(const __grid_constant__ Job job, RingShape shape, cuda_common::FastDivisor row_tiles) {
  constexpr bool kHasShared = std::is_same_v<Job, AllExpertsJob>;
  using Ring = UnitRing<kTokens>;
  const expert_tiles::Job& routed = routed_of(job);
  auto& s = *cuda_common::dynamic_shared<ExpertRing<kTokens>>();
  s.ring.init();
  if constexpr (Tiles::kIsFirst) {
    expert_tiles::prefetch_matrices(routed);
    if constexpr (kHasShared) {
      __syncthreads();
      if (is_copying_warp()) {
        const Tiles tiles(job, {s.list.entries, 0}, row_tiles);
        const SharedFirstRange<Tiles::kSharedFormat> range(shape, tiles.num_shared(), tiles.num_shared());
        copy_units(shape, range, tiles, s.ring, 0, range.template num_first<Ring>());
      }
    }
    cuda_common::wait_for_previous();
  }
  const Tiles tiles(job, expert_tiles::work_of<kTokens>(routed, s.list), row_tiles);
  const auto range = [&] {
    if constexpr (kHasShared) {
      return SharedFirstRange<Tiles::kSharedFormat>(shape, tiles.num_shared(), tiles.count());
    } else {
      return RingRange<>(tiles.count());
    }
  }();
  const auto zero_foreign = [&] {
    for (int64_t slot = blockIdx.x; slot < routed.num_slots; slot += gridDim.x) {
      expert_tiles::zero_if_foreign(routed, slot);
    }
  };
  if (is_copying_warp()) {
    int first = 0;
    if constexpr (Tiles::kIsFirst && kHasShared) first = range.template num_first<Ring>();
    copy_units(shape, range, tiles, s.ring, first, range.place(units_of(shape, range)));
    if constexpr (Tiles::kIsFirst) zero_foreign();
    return;
  }
  if constexpr (Tiles::kIsFirst) {
    zero_foreign();  // while the first units are on their way
  } else {
    cuda_common::wait_for_previous();
  }
  ring_tiles<kAreWhole>(shape, range, tiles, s.ring);
}

// Of both launches, by tiles GateAndUp and Down of a job.
template <int kTokens, class GateAndUp, class Down, class Job>
void run(const char* gate_and_up, const char* down, const ops::MoeExperts::Desc& desc,
         const ops::MoeExperts::Args& args, const Job& job, int64_t num_slots, device::Queue& queue) {
  const auto start = [&](const char* name, auto all, int64_t width, int64_t rows) {
    using Tiles = typename decltype(all)::type;
    using Ring = ExpertRing<kTokens>;
    const cuda_common::FastDivisor row_tiles(static_cast<uint32_t>(rows / cuda_common::kTileRows));
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>(num_slots * row_tiles.divisor(), cuda_common::multiprocessors()));
    const RingShape shape(width, Tiles::kPasses, RingPlan<kTokens>::kRoundUnits);
    const auto launch = [&](auto kernel) {
      cuda_common::launch(name, queue, kernel, dim3(blocks), RingPlan<kTokens>::kThreads, sizeof(Ring), job, shape,
                          row_tiles);
    };
    // Only a rank's part of an expert's width is not whole chunks.
    if constexpr (!Tiles::kIsFirst) {
      if (shape.columns.last_blocks < kChunkBlocks) return launch(ring_experts<kTokens, false, Tiles, Job>);
    }
    launch(ring_experts<kTokens, true, Tiles, Job>);
  };
  start(gate_and_up, std::type_identity<GateAndUp>(), desc.hidden, desc.inner);
  if constexpr (std::is_same_v<Job, expert_tiles::Job>) {
    expert_tiles::round_h(desc, args, DType::kBF16, job, queue);
  }
  start(down, std::type_identity<Down>(), desc.inner, desc.hidden);
}

// Calls with(std::integral_constant<int, tokens of a tile>).
template <class With>
void with_tokens(int64_t num_tokens, const With& with) {
  if (num_tokens == 1) return with(std::integral_constant<int, 1>());
  with(std::integral_constant<int, cuda_common::kTileTokens>());
}

}  // namespace

void moe_experts_ring(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  expert_tiles::Job job{};
  expert_tiles::begin(desc, args, true, queue, job);
  with_tokens(args.num_tokens, [&](auto tokens) {
    run<tokens.value, expert_tiles::GateAndUpTiles<Share>, expert_tiles::DownTiles<Share>>(
        "gate_and_up_ring", "down_ring", desc, args, job, job.num_slots, queue);
  });
}

void all_experts_ring(const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& args, device::Queue& queue) {
  const ops::AllExperts::Args parts = ops::with_parts_filled_in(args);
  AllExpertsJob job{{}, shared_expert_of(desc, parts)};
  expert_tiles::begin(desc.routed, parts.routed, true, queue, job.routed);
  const auto run_with = [&]<class Shared>(std::type_identity<Shared>) {
    with_tokens(args.num_tokens, [&](auto tokens) {
      run<tokens.value, AllGateAndUpTiles<Share, Shared>, AllDownTiles<Share, Shared>>(
          "all_gate_and_up_ring", "all_down_ring", desc.routed, parts.routed, job, job.routed.num_slots + 1, queue);
    });
  };
  if (desc.down.format == WeightFormat::kFp8Block) return run_with(std::type_identity<RingFp8Halves>());
  run_with(std::type_identity<RingNvfp4>());
}

}  // namespace tessera::backends::sm90
