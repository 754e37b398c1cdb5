// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of at most 8 tokens a tile with packed NVFP4 weights: the weights' read is what bounds them, so
// all that happens is copying ahead, decoding and mma_bf16. Bit for bit the sums of cuda_common/mma_sums.cuh.
//   tile   64 rows (what rows are, Tiles says) by up to 8 tokens, one team's from the first column to the last
//   team   four warps of 16 rows each, with a ring of stages of 512 columns, weights and inputs
//   block  four teams, and for each a warp that fills its ring by bulk copies
// Tiles is a class as wide_sums.cuh describes it, of kSlots slots.
#include <cstdint>
#include <type_traits>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/sum_plans.h"
#include "backends/sm90/unit_stage.cuh"

namespace tessera::backends::sm90 {

using cuda_common::RingPlace;

struct Few : FewPlan {
  using Inputs = LaneInputs;

  using Weights = UnitStage<kSlots>;
  static constexpr int kUnitBlocks = Weights::Layout::kBlocks;

  // 512 columns.
  struct Stage {
    static_assert(Inputs::kColumns == cuda_common::kChunk && Inputs::kRows == kTokens);
    char inputs[Inputs::kBytes];
    Weights weights;

    __device__ uint4 inputs_of(int block, int i, int lane) const {
      return reinterpret_cast<const uint4*>(inputs)[Inputs::place_of(lane / 4, block, i, lane % 4)];
    }
  };
  struct Shared {
    Stage stages[kTeams][kStages];
    cuda_common::ptx::SharedBarrier full[kTeams][kStages], free[kTeams][kStages];
  };
};

// The tile of a team's turn.
__device__ inline int few_tile(int team, int turn) {
  return (turn * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * Few::kTeams + team;
}

// A lane of a team's copying warp: four bring a unit each, one the inputs.
struct FewCopier {
  const int team = (static_cast<int>(threadIdx.x) - Few::kTeams * Few::kTeamThreads) / cuda_common::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % cuda_common::kWarp;
  const bool is_inputs = lane == Few::kSlots;
  RingPlace<Few::kStages> at{};

  // The place's tile. `wait_for_inputs()`: before they are first read.
  template <class Tiles, class Wait>
  __device__ void copy(const Tiles& tiles, const typename Tiles::Place& place, Few::Shared& s,
                       const Wait& wait_for_inputs) {
    const int num_chunks = tiles.width() / cuda_common::kChunk;
    const int stride = is_inputs ? Few::Inputs::kBytes : cuda_common::PackedNvfp4::kBytes;  // between chunks
    // Inputs of no more tokens than there are: the others' sums are anything.
    const int input_bytes = tiles.tokens(place) * Few::Inputs::kRowBytes;
    const char* from = is_inputs ? tiles.inputs(place) : lane < Few::kSlots ? tiles.unit(place, lane) : nullptr;
    const int num_units = __popc(__ballot_sync(~0u, from != nullptr && !is_inputs));
    for (int chunk = 0; chunk < num_chunks; ++chunk, at.advance()) {
      const int unit_bytes =
          cuda_common::PackedNvfp4::bytes_of(chunk + 1 < num_chunks ? Few::kUnitBlocks : tiles.last_unit_blocks());
      Few::Stage& stage = s.stages[team][at.stage];
      auto& full = s.full[team][at.stage];
      s.free[team][at.stage].wait(at.parity ^ 1);
      if (lane == 0) full.arrive_and_expect(num_units * unit_bytes + input_bytes);
      __syncwarp();
      if (from != nullptr && !is_inputs) {
        cuda_common::ptx::copy_bulk_once(stage.weights.units[lane], from + chunk * stride, unit_bytes, full);
      }
      __syncwarp();  // weights are on their way while inputs are waited for
      if (!is_inputs) continue;
      if (chunk == 0) wait_for_inputs();
      cuda_common::ptx::copy_bulk(stage.inputs, from + chunk * stride, input_bytes, full);
    }
  }
};

// A lane of a team.
struct FewConsumer {
  const int team = static_cast<int>(threadIdx.x) / Few::kTeamThreads;
  const int warp = static_cast<int>(threadIdx.x) / cuda_common::kWarp % Few::kSlots;
  const int lane = static_cast<int>(threadIdx.x) % cuda_common::kWarp;
  RingPlace<Few::kStages> at{};

  // The place's tile, and its results.
  template <class Tiles>
  __device__ void sum(const Tiles& tiles, const typename Tiles::Place& place, Few::Shared& s) {
    using Share = cuda_common::PackedShare<ops::WeightFormat::kNvfp4>;
    const int num_chunks = tiles.width() / cuda_common::kChunk, last_blocks = tiles.last_unit_blocks();
    const int num_whole = last_blocks == Few::kUnitBlocks ? num_chunks : num_chunks - 1;
    float sums[1][4] = {};
    uint32_t carries[2] = {};
    // The next chunk, whose products add_products(stage, chains) adds.
    const auto add_chunk = [&](const auto& add_products) {
      s.full[team][at.stage].wait(at.parity);
      cuda_common::Chains chains = {};
      add_products(s.stages[team][at.stage], chains);
      s.free[team][at.stage].arrive_behind(cuda_common::word_of(chains));
      at.advance();
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][i] += chains[0][i] + chains[1][i];
    };
    // Neighbouring blocks of it, whose weights are loaded before the first is multiplied.
    const auto add_blocks = [&](auto count, int first, const Few::Stage& stage, cuda_common::Chains& chains) {
      constexpr int kCount = decltype(count)::value;
      Share shares[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) shares[n] = tiles.share(stage.weights, first + n, 0, warp, lane);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        uint4 inputs[cuda_common::kShareColumns / 8];
#pragma unroll
        for (int i = 0; i < cuda_common::kShareColumns / 8; ++i) inputs[i] = stage.inputs_of(first + n, i, lane);
        shares[n].prepare(shares[n].scales[0]);
        carries[0] |= shares[n].carries[0], carries[1] |= shares[n].carries[1];
        cuda_common::add_block(shares[n], inputs, chains);
      }
    };
    for (int chunk = 0; chunk < num_whole; ++chunk) {
      add_chunk([&](const Few::Stage& stage, cuda_common::Chains& chains) {
        add_blocks(std::integral_constant<int, Few::kUnitBlocks>(), 0, stage, chains);
      });
    }
    if (num_whole < num_chunks) {  // blocks that are not there cost nothing
      add_chunk([&](const Few::Stage& stage, cuda_common::Chains& chains) {
#pragma unroll 1
        for (int b = 0; b < last_blocks; ++b) add_blocks(std::integral_constant<int, 1>(), b, stage, chains);
      });
    }
    // What is NaN stays so: once for a tile is enough.
    cuda_common::add_nans<Share>(carries, sums);
    tiles.template store<Few::kTokens>(place, warp, lane, sums[0]);
  }
};

// By all threads of a block.
__device__ inline void init_few(Few::Shared& s) {
  if (threadIdx.x < Few::kTeams * Few::kStages) {
    (&s.full[0][0] + threadIdx.x)->init(1);
    (&s.free[0][0] + threadIdx.x)->init(Few::kTeamThreads);
  }
  __syncthreads();
}

__device__ inline bool is_few_copier() {
  return threadIdx.x >= Few::kTeams * Few::kTeamThreads;
}

template <class Tiles, class Job>
__global__ void __launch_bounds__(Few::kThreads, 1) few_sums(Job job) {
  Few::Shared& s = *cuda_common::swizzled_shared<Few::Shared>();
  init_few(s);
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  if (is_few_copier()) {
    FewCopier copier;
    for (int turn = 0, tile; (tile = few_tile(copier.team, turn)) < tiles.count(); ++turn) {
      copier.copy(tiles, tiles.place(tile), s, [] {});
    }
  } else {
    FewConsumer consumer;
    for (int turn = 0, tile; (tile = few_tile(consumer.team, turn)) < tiles.count(); ++turn) {
      consumer.sum(tiles, tiles.place(tile), s);
    }
  }
}

template <class Tiles, class Job>
void launch_few(const char* name, const device::Queue& queue, int64_t most_tiles, const Job& job) {
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(ceil_div<int64_t>(most_tiles, Few::kTeams), cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, few_sums<Tiles, Job>, dim3(blocks), Few::kThreads, sizeof(Few::Shared), job);
}

}  // namespace tessera::backends::sm90
