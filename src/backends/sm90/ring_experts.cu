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
  cuda_common::ptx::SharedBarrier listed;

  // By all threads.
  __device__ void init() {
    ring.init();
    if (threadIdx.x == 0) listed.init(cuda_common::kWarp);
    __syncthreads();
  }
};

__device__ const expert_tiles::Job& routed_of(const expert_tiles::Job& job) {
  return job;
}
__device__ const expert_tiles::Job& routed_of(const AllExpertsJob& job) {
  return job.routed;
}

// A block's tiles, of which the shared expert's come first. Down's are dealt out so that a block has as many in all as
// any other or one more. Of gate and up those of the shared expert are done before others are known (kIsEarly), so each
// kind is dealt out for itself: routed ones that are left over go to the first blocks, the shared expert's to the last.
// Of an FP8 shared expert (others' are NVFP4) a unit takes two places.
template <WeightFormat kFormat, bool kIsEarly>
struct SharedFirstRange {
  static constexpr bool kHasGuests = kFormat != WeightFormat::kNvfp4;
  using Guests = std::conditional_t<kHasGuests, RingFp8Halves, RingNvfp4>;
  RingRange<> shared;
  int count, others;  // of all; the first of the others, less the place that it has here
  int num_shared_units;

  __device__ SharedFirstRange(const RingShape& shape, int num_shared, int num_tiles)
      : shared(num_shared, static_cast<int>(kIsEarly ? gridDim.x - 1 - blockIdx.x : blockIdx.x)) {
    num_shared_units = units_of(shape, shared);
    if constexpr (kIsEarly) {
      const RingRange<> routed(num_tiles - num_shared);
      count = shared.count + routed.count, others = num_shared + routed.first - shared.count;
    } else {
      const RingRange<> all(num_tiles);
      count = all.count, others = num_shared + all.first - shared.first - shared.count;
    }
  }
  __device__ int tile(int local) const { return local < shared.count ? shared.first + local : others + local; }
  __device__ bool is_guest(int unit) const { return unit < num_shared_units; }
  __device__ int place(int unit) const { return unit + min(unit, num_shared_units) * (Guests::kStages - 1); }
  __device__ int end_of_shared() const { return place(num_shared_units); }
  __device__ RingPart part_at(int place) const {
    if (place >= num_shared_units * Guests::kStages) return {place - num_shared_units * (Guests::kStages - 1), 0};
    return {place / Guests::kStages, place % Guests::kStages};
  }
};

// What a block has to do of both kinds of experts, or of routed ones alone.
template <class Tiles, class Job>
__device__ auto range_of(const RingShape& shape, const Tiles& tiles) {
  if constexpr (std::is_same_v<Job, AllExpertsJob>) {
    return SharedFirstRange<Tiles::kSharedFormat, Tiles::kIsFirst>(shape, tiles.num_shared(), tiles.count());
  } else {
    return RingRange<>(tiles.count());
  }
}

// Down's weights of the listed experts into the L2 cache, a share by each block's copying warps, where they are no more
// than half of it. Once gate and up's are there, before which they would be in their way.
__device__ void prefetch_down(const expert_tiles::Job& job, const expert_tiles::OwnList& list) {
  constexpr int kPiece = 4 << 10, kMost = 24 << 20, kThreads = RingPlan<1>::kCopyingWarps * cuda_common::kWarp;
  const auto expert_bytes =
      static_cast<int>(job.hidden / cuda_common::PackedNvfp4::kRows * cuda_common::PackedNvfp4::row_bytes(job.inner));
  if (int64_t{list.count} * expert_bytes > kMost) return;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, pieces = ceil_div(expert_bytes, kPiece);
  const int blocks = static_cast<int>(gridDim.x);
  for (int i = thread * blocks + static_cast<int>(blockIdx.x); i < list.count * pieces; i += kThreads * blocks) {
    const int at = i % pieces * kPiece;
    cuda_common::ptx::prefetch_bulk(static_cast<const char*>(list.entries[i / pieces].data[2]) + at,
                                    min(kPiece, expert_bytes - at));
  }
}

// Of gate and up the shared expert's tiles are summed up before the wait: their input is there since the kernel before
// the last has ended (ops/all_experts). Down's weights are copied before its wait, as experts_mma (cuda/moe.cu) does
// and for its reasons.
template <int kTokens, bool kAreWhole, class Tiles, class Job>
__global__ void __launch_bounds__(RingPlan<kTokens>::kThreads, 1)
    ring_experts(const __grid_constant__ Job job, RingShape shape, cuda_common::FastDivisor row_tiles) {
  constexpr bool kHasShared = std::is_same_v<Job, AllExpertsJob>, kIsEarly = Tiles::kIsFirst && kHasShared;
  constexpr int kFirstCopier = RingPlan<kTokens>::kWarps;
  const expert_tiles::Job& routed = routed_of(job);
  auto& s = *cuda_common::dynamic_shared<ExpertRing<kTokens>>();
  if constexpr (Tiles::kIsFirst) expert_tiles::prefetch_matrices(routed);
  s.init();
  const auto list_slots = [&](int by_warp) {
    if (static_cast<int>(threadIdx.x) / cuda_common::kWarp != by_warp) return;
    expert_tiles::list_few_slots<kTokens>(routed, s.list);
    s.listed.arrive();
  };
  // While the slots are not listed, the shared expert's alone.
  const auto tiles_of = [&](int num_listed) { return Tiles(job, {s.list.entries, num_listed}, row_tiles); };
  if (is_copying_warp()) {
    int begin = 0;
    if constexpr (kHasShared) {
      const Tiles tiles = tiles_of(0);
      const auto range = range_of<Tiles, Job>(shape, tiles);
      begin = range.end_of_shared();
      copy_units(shape, range, tiles, s.ring, 0, begin);
      __syncwarp();
    }
    if constexpr (Tiles::kIsFirst) {
      cuda_common::wait_for_previous();
      list_slots(kFirstCopier);
    }
    s.listed.wait(0);
    const Tiles tiles = tiles_of(s.list.count);
    const auto range = range_of<Tiles, Job>(shape, tiles);
    const int end = range.place(units_of(shape, range));
    copy_units(shape, range, tiles, s.ring, begin, end);
    __syncwarp();
    if constexpr (Tiles::kIsFirst) {
      expert_tiles::zero_foreign_slots(routed);
      wait_for_last_copy(s.ring, end);
      prefetch_down(routed, s.list);
    }
    return;
  }
  int turn = 0, num_done = 0;
  if constexpr (!Tiles::kIsFirst) list_slots(0);
  if constexpr (kIsEarly) {
    const Tiles tiles = tiles_of(0);
    const auto range = range_of<Tiles, Job>(shape, tiles);
    num_done = range.count;
    ring_tiles<kAreWhole>(shape, range, tiles, 0, num_done, turn, s.ring, [] { cuda_common::wait_for_previous(); });
  }
  cuda_common::wait_for_previous();
  if constexpr (Tiles::kIsFirst) expert_tiles::zero_foreign_slots(routed);  // while the first units are on their way
  s.listed.wait(0);
  const Tiles tiles = tiles_of(s.list.count);
  const auto range = range_of<Tiles, Job>(shape, tiles);
  ring_tiles<kAreWhole>(shape, range, tiles, num_done, range.count, turn, s.ring, [] {});
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
