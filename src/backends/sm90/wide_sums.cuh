// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of many tokens with packed NVFP4 weights: wgmma, weights decoded in registers as the A operand,
// so that each is decoded once for up to 128 tokens. Bit for bit the sums of cuda_common/mma_sums.cuh: the same sixteen
// products at a time, chains of even and odd steps, chunks of 512 columns in ascending order.
//   tile       128 rows (what rows are, Tiles says) by up to 128 tokens; a thread block takes tile after tile
//   consumers  two warpgroups, 64 rows each: a warp decodes 16 rows of 128 columns while products before them run
//   producers  a warp for inputs, 128 columns at a time, and one for weights, 512; by bulk copies, ahead over tiles too
// What the tiles of a launch are, a class Tiles says:
//   width(), count()     columns, a multiple of 512; tiles
//   place(tile)          what all else about a tile is worked out from
//   unit(place, slot)    column 0 of the packed unit for slot 0 to 7 of a stage; null: none, anything may lie there
//   inputs(place)        the tile's inputs, arranged (arranged_inputs.cuh)
//   tokens(place)        1 to 128
//   share(weights, block, warp, lane)
//                        of a stage: a lane's codes of block 0 to 3, and its scales' codes in scales[0]
//   store<kTokens>(place, warp, lane, sums)
//                        takes a lane's sums; sums[4 j + i] as ptx/wgmma.cuh says
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/registers.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/sum_plans.h"
#include "backends/sm90/unit_stage.cuh"

namespace tessera::backends::sm90 {

namespace ptx = cuda_common::ptx;
using cuda_common::kChunk, cuda_common::kShareBlock, cuda_common::kWarp;
using cuda_common::PackedNvfp4, cuda_common::RingPlace;
using PackedShare = cuda_common::PackedShare<ops::WeightFormat::kNvfp4>;

struct Wide : WidePlan {
  // 240 hold two chains and the sums, 64 each, and two steps' weights.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Inputs = ProductInputs;
  using Weights = UnitStage<kSlots>;  // 512 columns

  static_assert(kWeightColumns == kChunk && kInputColumns == kShareBlock);
  struct Shared {
    char inputs[kInputStages][kTokens / ArrangedInputs::kRows][ArrangedInputs::kBytes];  // 128 columns
    Weights weights[kWeightStages];
    ptx::SharedBarrier inputs_full[kInputStages], inputs_free[kInputStages];
    ptx::SharedBarrier weights_full[kWeightStages], weights_free[kWeightStages];
  };
};

// A warp that brings inputs, one of its lanes.
template <class Tiles>
__device__ void produce_inputs(const Tiles& tiles, Wide::Shared& s) {
  if (threadIdx.x % kWarp != 0) return;
  const int num_blocks = tiles.width() / kShareBlock;
  RingPlace<Wide::kInputStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles.count(); tile += static_cast<int>(gridDim.x)) {
    const auto place = tiles.place(tile);
    const char* from = tiles.inputs(place);
    const int bytes = ArrangedInputs::stride(tiles.tokens(place));
    for (int block = 0; block < num_blocks; ++block, at.advance(), from += bytes) {
      ptx::SharedBarrier& full = s.inputs_full[at.stage];
      s.inputs_free[at.stage].wait(at.parity ^ 1);
      full.arrive_and_expect(bytes);
      ptx::copy_bulk(s.inputs[at.stage], from, bytes, full);
    }
  }
}

// A warp that brings weights, a lane each unit.
template <class Tiles>
__device__ void produce_weights(const Tiles& tiles, Wide::Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, num_chunks = tiles.width() / kChunk;
  RingPlace<Wide::kWeightStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles.count(); tile += static_cast<int>(gridDim.x)) {
    const char* from = lane < Wide::kSlots ? tiles.unit(tiles.place(tile), lane) : nullptr;
    const int bytes = __popc(__ballot_sync(~0u, from != nullptr)) * PackedNvfp4::kBytes;
    for (int chunk = 0; chunk < num_chunks; ++chunk, at.advance()) {
      ptx::SharedBarrier& full = s.weights_full[at.stage];
      s.weights_free[at.stage].wait(at.parity ^ 1);
      if (lane == 0) full.arrive_and_expect(bytes);
      __syncwarp();
      if (from == nullptr) continue;
      ptx::copy_bulk(s.weights[at.stage].units[lane], from + chunk * PackedNvfp4::kBytes, PackedNvfp4::kBytes, full);
    }
  }
}

// A consumer's walk: its next share is loaded while products of the one before run.
template <class Tiles>
class WideConsumer {
 public:
  __device__ WideConsumer(const Tiles& tiles, Wide::Shared& s) : tiles_(tiles), s_(s) {}

  __device__ void run() {
    int tile = static_cast<int>(blockIdx.x);
    if (tile < tiles_.count()) load(0);
    for (; tile < tiles_.count(); tile += static_cast<int>(gridDim.x)) {
      const int tokens = tiles_.tokens(tiles_.place(tile));
      const int product_tokens = Wide::product_tokens(tokens);
      if (product_tokens == Wide::kTokens) {
        run_tile<Wide::kTokens>(tile);
      } else if (product_tokens == 64) {
        run_tile<64>(tile);
      } else {
        run_tile<32>(tile);
      }
    }
  }

 private:
  static constexpr int kBlocks = kChunk / kShareBlock, kSteps = kShareBlock / 32;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  // The share of block 0 to 3 of a chunk, the chunk_-th of all tiles.
  __device__ void load(int block) {
    const int stage = chunk_ % Wide::kWeightStages;
    if (block == 0) s_.weights_full[stage].wait(chunk_ / Wide::kWeightStages % 2);
    next_ = tiles_.share(s_.weights[stage], block, warp(), lane());
  }

  // This warp's products need the stage no more; a warp waits for them as one.
  __device__ static void release_inputs(ptx::SharedBarrier& free) {
    if (lane() == 0) free.arrive();
  }

  template <int kTokens>
  __device__ void run_tile(int tile) {
    constexpr int kSums = kTokens / 2;
    float sums[kSums] = {}, chains[2][kSums];
    uint32_t operands[2][2][4];  // of two steps, two products each
    for (int chunks_left = tiles_.width() / kChunk; chunks_left > 0; --chunks_left) {
      const int parity = chunk_ % 2;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        PackedShare share = next_;
        share.prepare(next_.scales[0], cuda_common::has_e4m3_nan(next_.scales[0]));
        s_.inputs_full[b].wait(parity);
        const auto inputs = ptx::SharedOperand::of(s_.inputs[b], ArrangedInputs::kBytes);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          auto& a = operands[step % 2];
          decode(share, step, a);
          ptx::begin_products();
          const auto columns = inputs + (step / 2 * ProductInputs::kHalfBytes + step % 2 * 64);
          ptx::wgmma_bf16<kTokens>(chains[step % 2], a[0], columns, b > 0 || step > 1);
          ptx::wgmma_bf16<kTokens>(chains[step % 2], a[1], columns + 32, true);
          ptx::commit_products();
          if (step == kSteps - 2) {
            if (b == kBlocks - 1) {
              s_.weights_free[chunk_ % Wide::kWeightStages].arrive();  // each lane has its last share of the stage
              ++chunk_;
            }
            if (b < kBlocks - 1 || chunks_left > 1 || tile + static_cast<int>(gridDim.x) < tiles_.count()) {
              load((b + 1) % kBlocks);
            }
          }
          if (b == kBlocks - 1 && step == kSteps - 1) {
            ptx::wait_for_products<0>();
          } else {
            ptx::wait_for_products<1>();
          }
          if (step == 0 && b > 0) release_inputs(s_.inputs_free[b - 1]);
        }
      }
      release_inputs(s_.inputs_free[kBlocks - 1]);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += chains[0][i] + chains[1][i];
    }
    tiles_.template store<kTokens>(tiles_.place(tile), warp(), lane(), sums);  // nothing of it is held meanwhile
  }

  // Two products' A operands.
  __device__ static void decode(const PackedShare& share, int step, uint32_t (&a)[2][4]) {
    uint32_t w[2][4];
    share.decode(0, step, w[0]);
    share.decode(1, step, w[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = w[i % 2][i / 2], a[1][i] = w[i % 2][2 + i / 2];
  }

  const Tiles& tiles_;
  Wide::Shared& s_;
  int chunk_ = 0;
  PackedShare next_;
};

template <class Tiles, class Job>
__global__ void __launch_bounds__(Wide::kThreads, 1) wide_sums(Job job) {
  Wide::Shared& s = *cuda_common::swizzled_shared<Wide::Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  if (thread < Wide::kInputStages) s.inputs_full[thread].init(1), s.inputs_free[thread].init(Wide::kConsumerWarps);
  if (thread < Wide::kWeightStages)
    s.weights_full[thread].init(1), s.weights_free[thread].init(Wide::kConsumerWarps * kWarp);
  __syncthreads();
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  if (warp >= Wide::kConsumerWarps) {
    ptx::give_registers_back<Wide::kProducerRegisters>();
    if (warp == Wide::kConsumerWarps) produce_inputs(tiles, s);
    if (warp == Wide::kConsumerWarps + 1) produce_weights(tiles, s);
  } else {
    ptx::take_registers<Wide::kConsumerRegisters>();
    WideConsumer<Tiles>(tiles, s).run();
  }
}

// On as many thread blocks as the GPU holds at once, at most.
template <class Tiles, class Job>
void launch_wide(const char* name, const device::Queue& queue, int64_t most_tiles, const Job& job) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most_tiles, cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, wide_sums<Tiles, Job>, dim3(blocks), Wide::kThreads, sizeof(Wide::Shared), job);
}

}  // namespace tessera::backends::sm90
