// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of many tokens with packed weights: wgmma, weights decoded in registers as the A operand, so that
// each is decoded once for up to 128 tokens. Bit for bit the sums of cuda_common/mma_sums.cuh: the same sixteen
// products at a time, chains of even and odd steps, chunks of 512 columns in ascending order; chains of FP8 whose
// scales do not fold end with each 128 columns, whose scale they are then multiplied by.
//   tile       128 rows (what rows are, Tiles says) by up to 128 tokens, of that FP8 96; a block takes tile after tile
//   consumers  two warpgroups, 64 rows each: a warp decodes 16 rows while products before them run
//   producers  a warp for inputs, 128 columns at a time, and one or two for weights, a unit's; by bulk copies, ahead
//              over tiles too
// What the tiles of a launch are, a class Tiles says:
//   kFormat, kFolds      of the weights; of FP8 whether its scales fold
//   kKnowsWeights        whether place() and unit() read nothing that kernels make: then weights' copies do not wait
//                        for the kernel before
//   width(), count()     columns, a multiple of 512; tiles
//   last_unit_blocks()   of 128 columns, of a row's last unit: where the weights have fewer than width() the inputs
//                        are zero
//   place(tile)          what all else about a tile is worked out from
//   unit(place, slot)    column 0 of the packed unit for slot 0 to 7 of a stage; null: none, anything may lie there
//   block_scales(place, slot)   FP8: the scales of its rows, of column 0 on
//   Share                what a lane decodes: WideOf::Share
//   inputs(place)        the tile's inputs, arranged (arranged_inputs.cuh)
//   tokens(place)        1 to kTokens
//   kTileTokens          tokens of the products of every tile: the kernel then has one loop instead of one for each
//                        number, which ptxas makes shorter where tokens are few; 0: by each tile's tokens
//   share(weights, block, part, warp, lane)
//                        of a stage: a lane's codes of a block of 128 columns of the unit, of these a part: NVFP4 all,
//                        FP8 a half, BF16 a quarter (unit_stage.cuh)
//   store<kTokens>(place, warp, lane, sums)
//                        takes a lane's sums; sums[4 j + i] as ptx/wgmma.cuh says
#include <cstdint>
#include <type_traits>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/registers.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/sum_plans.h"
#include "backends/sm90/uniform.cuh"
#include "backends/sm90/unit_stage.cuh"
#include "base/error.h"

namespace tessera::backends::sm90 {

namespace ptx = cuda_common::ptx;
using cuda_common::kChunk, cuda_common::kShareBlock, cuda_common::kWarp;
using cuda_common::RingPlace;

template <ops::WeightFormat kFormat, bool kFolds = false>
struct WideOf : WidePlanOf<kFormat, kFolds> {
  using Plan = WidePlanOf<kFormat, kFolds>;
  using Share = std::conditional_t<kFolds, cuda_common::FoldedFp8Share, cuda_common::PackedShare<kFormat>>;
  // 240 hold two chains and the sums, 64 each, and two steps' weights; or four sets of 48 of FP8 that does not fold.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Inputs = ProductInputs;
  using Weights = UnitStageOf<kFormat, Plan::kSlots>;

  static_assert(kChunk % Plan::kWeightColumns == 0 && Plan::kInputColumns == kShareBlock &&
                Plan::kInputStages * kShareBlock == kChunk);
  struct Shared {
    char inputs[Plan::kInputStages][Plan::kTokens / ProductInputs::kRows][ProductInputs::kBytes];  // 128 columns
    Weights weights[Plan::kWeightStages];
    ptx::SharedBarrier inputs_full[Plan::kInputStages], inputs_free[Plan::kInputStages];
    ptx::SharedBarrier weights_full[Plan::kWeightStages], weights_free[Plan::kWeightStages];
  };
};
using Wide = WideOf<ops::WeightFormat::kNvfp4>;
template <class Tiles>
using WideFor = WideOf<Tiles::kFormat, Tiles::kFolds>;

// A warp that brings inputs, one of its lanes.
template <class Tiles>
__device__ void produce_inputs(const Tiles& tiles, typename WideFor<Tiles>::Shared& s) {
  if (threadIdx.x % kWarp != 0) return;
  const int num_blocks = tiles.width() / kShareBlock;
  RingPlace<WideFor<Tiles>::kInputStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles.count(); tile += static_cast<int>(gridDim.x)) {
    const auto place = tiles.place(tile);
    const char* from = tiles.inputs(place);
    const int bytes = ProductInputs::stride(tiles.tokens(place));
    for (int block = 0; block < num_blocks; ++block, at.advance(), from += bytes) {
      ptx::SharedBarrier& full = s.inputs_full[at.stage];
      s.inputs_free[at.stage].wait(at.parity ^ 1);
      full.arrive_and_expect(bytes);
      ptx::copy_bulk(s.inputs[at.stage], from, bytes, full);
    }
  }
}

// A warp that brings weights, a lane each unit; number `producer` of kWeightProducers.
template <class Tiles>
__device__ void produce_weights(const Tiles& tiles, typename WideFor<Tiles>::Shared& s, int producer) {
  using Wide = WideFor<Tiles>;
  constexpr int kBytes = Wide::Unit::kBytes, kUnits = Wide::kSlots / Wide::kWeightProducers;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, slot = producer * kUnits + lane;
  const int num_units = tiles.width() / Wide::kWeightColumns;
  RingPlace<Wide::kWeightStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles.count(); tile += static_cast<int>(gridDim.x)) {
    const char* from = lane < kUnits ? tiles.unit(tiles.place(tile), slot) : nullptr;
    const int num_rows = __popc(__ballot_sync(~0u, from != nullptr));
    for (int unit = 0; unit < num_units; ++unit, at.advance()) {
      const int bytes = Wide::Unit::bytes_of(unit + 1 < num_units ? Wide::Unit::kBlocks : tiles.last_unit_blocks());
      ptx::SharedBarrier& full = s.weights_full[at.stage];
      s.weights_free[at.stage].wait(at.parity ^ 1);
      if (lane == 0) full.arrive_and_expect(num_rows * bytes);
      __syncwarp();
      if (from == nullptr) continue;
      ptx::copy_bulk(s.weights[at.stage].units[slot], from + unit * kBytes, bytes, full);
    }
  }
}

// A consumer's walk: its next share is loaded while products of the one before run.
template <class Tiles>
class WideConsumer {
 public:
  using Wide = WideFor<Tiles>;
  __device__ WideConsumer(const Tiles& tiles, typename Wide::Shared& s) : tiles_(tiles), s_(s) {}

  __device__ void run() {
    int tile = static_cast<int>(blockIdx.x);
    if (tile < tiles_.count()) load(0, 0);
    for (; tile < tiles_.count(); tile += static_cast<int>(gridDim.x)) {
      if constexpr (Tiles::kTileTokens > 0) {
        run_tile<Tiles::kTileTokens>(tile);
      } else {
        run_tile_of(Wide::product_tokens(uniform(tiles_.tokens(tiles_.place(tile)))), tile);
      }
    }
  }

 private:
  using Unit = typename Wide::Unit;
  using Share = typename Wide::Share;
  static constexpr bool kFolds = Tiles::kFolds;
  static constexpr int kBlocks = kChunk / kShareBlock, kSteps = kShareBlock / 32;
  static constexpr int kParts = Unit::kBlockPieces / 2, kPartSteps = kSteps / kParts;
  // Of a part the step whose products run while the next part is loaded: the last but one, if a part has so many.
  static constexpr int kLoadStep = kPartSteps > 2 ? kPartSteps - 2 : kPartSteps - 1;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  // The part behind the last that was loaded; block 4 is the next chunk's first.
  __device__ void load_next(int block, int part, bool has_next) {
    if (part == 0 && block % Unit::kBlocks == 0) {
      s_.weights_free[weights_.stage].arrive();  // each lane has its last share of the stage
      weights_.advance();
    }
    if (has_next) load(block % kBlocks, part);
  }
  // A part of block 0 to 3 of a chunk.
  __device__ void load(int block, int part) {
    if (block % Unit::kBlocks == 0 && part == 0) s_.weights_full[weights_.stage].wait(weights_.parity);
    next_ = tiles_.share(s_.weights[weights_.stage], block % Unit::kBlocks, part, warp(), lane());
  }

  // This warp's products need the stage no more; a warp waits for them as one.
  __device__ static void release_inputs(ptx::SharedBarrier& free) {
    if (lane() == 0) free.arrive();
  }

  // There is a loop for each number of tokens.
  template <int kTokens = Wide::product_tokens(1)>
  __device__ void run_tile_of(int product_tokens, int tile) {
    if constexpr (kTokens < Wide::kTokens) {
      if (product_tokens != kTokens) return run_tile_of<Wide::product_tokens(kTokens + 1)>(product_tokens, tile);
    }
    run_tile<kTokens>(tile);
  }
  template <int kTokens>
  __device__ void run_tile(int tile) {
    constexpr int kSums = kTokens / 2;
    constexpr bool kIsScaled = Share::kScaledSum;
    float sums[kSums] = {}, chains[2][kSums];
    float scaled[kIsScaled ? kSums : 1];  // of blocks, a chunk's
    uint32_t operands[2][2][4];           // of two steps, two products each
    uint32_t nans[2] = {};                // Share's carries
    const float* scales = nullptr;
    if constexpr (kIsScaled || kFolds) scales = tiles_.block_scales(tiles_.place(tile), warp());
    float next_scale = 1;  // of a block, where codes wait for it
    if constexpr (kFolds) next_scale = __ldg(scales);
    for (int chunks_left = tiles_.width() / kChunk; chunks_left > 0; --chunks_left) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float scale = 1;
        if constexpr (kIsScaled) scale = __ldg(scales++);
        if constexpr (kFolds) {
          scale = next_scale;
          if (b < kBlocks - 1 || chunks_left > 1) next_scale = __ldg(++scales);
        }
        s_.inputs_full[b].wait(inputs_parity_);
        const auto inputs = ptx::SharedOperand::of(s_.inputs[b], ProductInputs::kBytes);
        Share share;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const bool ends_part = step % kPartSteps == kPartSteps - 1, ends_block = step == kSteps - 1;
          if (step % kPartSteps == 0) share = prepared(nans, scale);
          auto& a = operands[step % 2];
          decode(share, step % kPartSteps, a);
          if constexpr (Share::kFindsNan) {
            if (ends_part) nans[0] = share.carries[0], nans[1] = share.carries[1];
          }
          ptx::begin_products();
          const auto columns = inputs + (step / 2 * ProductInputs::kHalfBytes + step % 2 * 64);
          ptx::wgmma_bf16<kTokens>(chains[step % 2], a[0], columns, (!kIsScaled && b > 0) || step > 1);
          ptx::wgmma_bf16<kTokens>(chains[step % 2], a[1], columns + 32, true);
          ptx::commit_products();
          const bool loads = step % kPartSteps == kLoadStep, ends_chunk = ends_block && b == kBlocks - 1;
          const int next_part = (step / kPartSteps + 1) % kParts, next_block = b + (next_part == 0 ? 1 : 0);
          const bool has_next =
              next_block < kBlocks || chunks_left > 1 || tile + static_cast<int>(gridDim.x) < tiles_.count();
          if (loads && !ends_chunk) load_next(next_block, next_part, has_next);
          if (ends_block && (kIsScaled || b == kBlocks - 1)) {
            ptx::wait_for_products<0>();
            release_inputs(s_.inputs_free[b]);
          } else {
            ptx::wait_for_products<1>();
          }
          // Behind the wait: what crosses the loop's edge ptxas moves into registers that products under way still
          // read.
          if (loads && ends_chunk) load_next(next_block, next_part, has_next);
          if (!kIsScaled && step == 0 && b > 0) release_inputs(s_.inputs_free[b - 1]);
        }
        if constexpr (kIsScaled) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            scaled[i] = (b == 0 ? 0.0f : scaled[i]) + (chains[0][i] + chains[1][i]) * scale;
          }
        }
      }
      inputs_parity_ ^= 1;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += kIsScaled ? scaled[i] : chains[0][i] + chains[1][i];
    }
    if constexpr (Share::kFindsNan) add_nans(nans, sums);
    tiles_.template store<kTokens>(tiles_.place(tile), warp(), lane(), sums);  // nothing of it is held meanwhile
  }

  // What was loaded last; scale: of its block, where it folds.
  __device__ Share prepared(const uint32_t (&nans)[2], float scale) const {
    Share share = next_;
    if constexpr (Unit::kIsNvfp4) {
      share.prepare(next_.scales[0]);
      share.carries[0] |= nans[0], share.carries[1] |= nans[1];
    } else if constexpr (kFolds) {
      share.prepare(scale);
    } else if constexpr (Share::kFindsNan) {
      share.code_factor = cuda_common::kE4m3Unscale;
      share.carries[0] = nans[0], share.carries[1] = nans[1];
    }
    return share;
  }

  // Two products' A operands.
  __device__ static void decode(Share& share, int step, uint32_t (&a)[2][4]) {
    uint32_t w[2][4];
    share.decode(0, step, w[0]);
    share.decode(1, step, w[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = w[i % 2][i / 2], a[1][i] = w[i % 2][2 + i / 2];
  }

  // Rows with a NaN among their weights are NaN, whatever the token. What is NaN stays so: once for a tile is enough,
  // and most have none.
  template <int kSums>
  __device__ static void add_nans(const uint32_t (&nans)[2], float (&sums)[kSums]) {
    if (!__any_sync(~0u, Share::has_nan(nans[0], 0) || Share::has_nan(nans[1], 1))) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t of_row = nans[r] | __shfl_xor_sync(~0u, nans[r], 1);
      of_row |= __shfl_xor_sync(~0u, of_row, 2);
      if (!Share::has_nan(of_row, r)) continue;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (i % 4 / 2 == r) sums[i] = __uint_as_float(0x7FFFFFFF);
      }
    }
  }

  const Tiles& tiles_;
  typename Wide::Shared& s_;
  RingPlace<Wide::kWeightStages> weights_;  // where next_ is from
  int inputs_parity_ = 0;
  Share next_;
};

template <class Tiles, class Job>
__global__ void __launch_bounds__(Wide::kThreads, 1) wide_sums(Job job) {
  using Wide = WideFor<Tiles>;
  typename Wide::Shared& s = *cuda_common::swizzled_shared<typename Wide::Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  if (thread < Wide::kInputStages) s.inputs_full[thread].init(1), s.inputs_free[thread].init(Wide::kConsumerWarps);
  if (thread < Wide::kWeightStages) {
    s.weights_full[thread].init(Wide::kWeightProducers);
    s.weights_free[thread].init(Wide::kConsumerWarps * kWarp);
  }
  __syncthreads();
  const int producer = warp - Wide::kConsumerWarps - 1;  // of weights
  if (producer < 0 || !Tiles::kKnowsWeights) cuda_common::wait_for_previous();
  const Tiles tiles(job);
  if (warp >= Wide::kConsumerWarps) {
    ptx::give_registers_back<Wide::kProducerRegisters>();
    if (producer < 0) {
      produce_inputs(tiles, s);
    } else if (producer < Wide::kWeightProducers) {
      produce_weights(tiles, s, producer);
    }
  } else {
    ptx::take_registers<Wide::kConsumerRegisters>();
    WideConsumer<Tiles>(tiles, s).run();
  }
}

// Calls function(format, folds, tile tokens) with constants, the last Tiles::kTileTokens for tiles of so many
// (wide_tiles).
// A kernel with one loop of the most tokens is 5 % slower than one that has the others too
// (docs/performance/hopper.md).
template <class Function>
void with_wide_tiles(ops::WeightFormat format, bool folds, int32_t tile_tokens, const Function& function) {
  using ops::WeightFormat;
  const auto with_tokens = [&](auto of, auto is_folded) {
    TESSERA_CHECK(tile_tokens <= (WidePlanOf<of.value, is_folded.value>::kTokens), "tiles of too many tokens");
    if (tile_tokens == 32) return function(of, is_folded, std::integral_constant<int, 32>());
    if (tile_tokens == 64) return function(of, is_folded, std::integral_constant<int, 64>());
    function(of, is_folded, std::integral_constant<int, 0>());
  };
  switch (format) {
    case WeightFormat::kNvfp4:
      return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kNvfp4>(), std::false_type());
    case WeightFormat::kFp8Block: {
      const std::integral_constant<WeightFormat, WeightFormat::kFp8Block> fp8;
      return folds ? with_tokens(fp8, std::true_type()) : with_tokens(fp8, std::false_type());
    }
    case WeightFormat::kBf16:
      return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kBf16>(), std::false_type());
    case WeightFormat::kF32:
      break;  // declined
  }
}

// On as many thread blocks as the GPU holds at once, at most.
template <class Tiles, class Job>
void launch_wide(const char* name, const device::Queue& queue, int64_t most_tiles, const Job& job) {
  using Shared = typename WideFor<Tiles>::Shared;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most_tiles, cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, wide_sums<Tiles, Job>, dim3(blocks), Wide::kThreads, sizeof(Shared), job);
}

}  // namespace tessera::backends::sm90
