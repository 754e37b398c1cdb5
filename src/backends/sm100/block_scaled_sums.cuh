// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps with NVFP4 weights and NVFP4 inputs on Blackwell's tensor cores. What bounds it: few tokens the
// read of the weights, many the products. Weights are the operand of 128 rows, tokens the N columns, 8 to kTokens of
// them: so few tokens cost no more than they are. A tile's sums are one chain of products from zero in ascending
// columns, 64 at a time: they depend neither on the tile's tokens nor on who else is in it.
//   tile      128 rows of each of kMatrices matrices by up to kTokens tokens; a thread block takes tile after tile
//   warp 5    brings 256 columns at a time by bulk copies, kStages ahead, over tiles too
//   warp 4    one thread issues copies of scales, products and commits; two sets of sums, so that products of the
//             next tile run while those of the last are stored, and two of scales
//   warps 0-3 take sums from tensor memory, a row each thread, and store them
// What the tiles of a launch are, a class Tiles says:
//   kMatrices, kTokens     constants
//   width(), count()       columns; tiles
//   place(tile)            what all else about a tile is worked out from
//   weights(place, i)      the first packed tile of its rows in matrix i (packed_tiles.h)
//   inputs(place)          its input tile (input_tiles.cuh)
//   tokens(place)          1 to kTokens
//   store(place, row, first_token, sums)
//                          takes sums[i][j] of matrix i and token first_token + j, of row 0 to 127; by warps as one
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm100/input_tiles.cuh"
#include "backends/sm100/packed_tiles.h"
#include "backends/sm100/sums_plan.h"
#include "backends/sm100/tensor_plan.h"

namespace tessera::backends::sm100 {

namespace ptx = cuda_common::ptx;
using cuda_common::RingPlace;

constexpr int kWarp = 32, kStoreWarps = 4, kProductWarp = kStoreWarps, kCopyWarp = kProductWarp + 1;
constexpr int kSumsThreads = (kCopyWarp + 1) * kWarp, kStoreThreads = kStoreWarps * kWarp;

template <int kMatrices, int kTokens>
struct SumsShared {
  struct Stage {  // 256 columns
    char weights[kMatrices][PackedTile::kBytes];
    char inputs[InputTile::stage_bytes(kTokens)];
  };
  static constexpr int kStages = SumsPlan<kMatrices, kTokens>::kStages;
  static_assert(sizeof(Stage) == SumsPlan<kMatrices, kTokens>::kStageBytes);

  Stage stages[kStages];
  ptx::SharedBarrier full[kStages], free[kStages];
  ptx::SharedBarrier sums_full[2], sums_free[2];
  uint32_t tensor_memory;
};

template <class Tiles>
class BlockScaledSums {
 public:
  using Shared = SumsShared<Tiles::kMatrices, Tiles::kTokens>;
  using Plan = TensorPlan<Tiles::kMatrices, Tiles::kTokens>;

  __device__ BlockScaledSums(const Tiles& tiles, Shared& s) : tiles_(tiles), s_(s) {}

  // By one thread.
  __device__ void copy() {
    RingPlace<Shared::kStages> at;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step()) {
      const auto place = tiles_.place(tile);
      const int input_bytes = InputTile::stage_bytes(InputTile::padded(tiles_.tokens(place)));
      const char* inputs = tiles_.inputs(place);
      for (int stage = 0; stage < num_stages(); ++stage, at.advance()) {
        ptx::SharedBarrier& full = s_.full[at.stage];
        s_.free[at.stage].wait(at.parity ^ 1);
        full.arrive_and_expect(kMatrices * PackedTile::kBytes + input_bytes);
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
          ptx::copy_bulk(s_.stages[at.stage].weights[i],
                         tiles_.weights(place, i) + static_cast<int64_t>(stage) * PackedTile::kBytes,
                         PackedTile::kBytes, full);
        }
        ptx::copy_bulk(s_.stages[at.stage].inputs, inputs + static_cast<int64_t>(stage) * input_bytes, input_bytes,
                       full);
      }
    }
  }

  // By one thread.
  __device__ void multiply() {
    RingPlace<Shared::kStages> at;
    RingPlace<2> sums;
    int scale_set = 0;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step(), sums.advance()) {
      const int tokens = InputTile::padded(tiles_.tokens(tiles_.place(tile)));
      s_.sums_free[sums.stage].wait(sums.parity ^ 1);
      for (int stage = 0; stage < num_stages(); ++stage, at.advance(), scale_set ^= 1) {
        s_.full[at.stage].wait(at.parity);
        ptx::tcgen05::fence_after_thread_sync();
        multiply_stage(s_.stages[at.stage], sums.stage, scale_set, tokens, stage > 0);
        ptx::tcgen05::commit(s_.free[at.stage]);
      }
      ptx::tcgen05::commit(s_.sums_full[sums.stage]);
    }
  }

  // By kStoreThreads threads.
  __device__ void store() {
    RingPlace<2> sums;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step(), sums.advance()) {
      const auto place = tiles_.place(tile);
      const int tokens = InputTile::padded(tiles_.tokens(place));
      s_.sums_full[sums.stage].wait(sums.parity);
      ptx::tcgen05::fence_after_thread_sync();
      int token = 0;
      for (; token + 16 <= tokens; token += 16) store_some<16>(place, sums.stage, token);
      if (token < tokens) store_some<8>(place, sums.stage, token);
      ptx::tcgen05::fence_before_thread_sync();
      s_.sums_free[sums.stage].arrive();
    }
  }

 private:
  static constexpr int kMatrices = Tiles::kMatrices;

  __device__ static int first_tile() {
    return static_cast<int>(blockIdx.x);
  }
  __device__ static int tile_step() {
    return static_cast<int>(gridDim.x);
  }
  __device__ int num_stages() const {
    return static_cast<int>(PackedTile::tiles_of_row(tiles_.width()));
  }

  __device__ void multiply_stage(const typename Shared::Stage& stage, int sums, int scale_set, int tokens, bool adds) {
    using cuda_common::ScaleAtom, cuda_common::advance_descriptor, cuda_common::codes_descriptor;
    const uint32_t instruction = cuda_common::nvfp4_instruction(PackedTile::kRows, tokens);
    const uint32_t inputs = ptx::shared_address(stage.inputs), memory = s_.tensor_memory;
    const auto copy_scales = [&](uint32_t codes, int code_bytes, int operand, int product) {
      const uint32_t atom = codes + static_cast<uint32_t>(code_bytes + product * ScaleAtom::kBytes);
      ptx::tcgen05::cp_scales(memory + Plan::scales(scale_set, operand, product), cuda_common::scales_descriptor(atom));
    };
#pragma unroll
    for (int product = 0; product < PackedTile::kProducts; ++product) {
      const int bytes = product * cuda_common::Nvfp4Product::kBytes;
      copy_scales(inputs, cuda_common::SwizzledCodes::bytes(tokens), kMatrices, product);
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        const uint32_t weights = ptx::shared_address(stage.weights[i]);
        copy_scales(weights, PackedTile::kCodeBytes, i, product);
        ptx::tcgen05::mma_nvfp4(memory + Plan::sums(sums, i), advance_descriptor(codes_descriptor(weights), bytes),
                                advance_descriptor(codes_descriptor(inputs), bytes), instruction,
                                memory + Plan::scales(scale_set, i, product),
                                memory + Plan::scales(scale_set, kMatrices, product), adds || product > 0);
      }
    }
  }

  // kCount tokens of this thread's row.
  template <int kCount, class Place>
  __device__ void store_some(const Place& place, int set, int first_token) {
    const int row = static_cast<int>(threadIdx.x) % kStoreThreads;
    const uint32_t lanes = static_cast<uint32_t>(row / kWarp * kWarp) << 16;
    uint32_t bits[kMatrices][kCount];
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      ptx::tcgen05::ld(bits[i], s_.tensor_memory + lanes + Plan::sums(set, i) + static_cast<uint32_t>(first_token));
    }
    float sums[kMatrices][kCount];
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      ptx::tcgen05::wait_ld(bits[i]);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[i][j] = __uint_as_float(bits[i][j]);
    }
    tiles_.store(place, row, first_token, sums);
    __syncwarp();  // lanes without a row left early, and all read tensor memory as one
  }

  const Tiles& tiles_;
  Shared& s_;
};

template <class Tiles, class Job>
__global__ void __launch_bounds__(kSumsThreads, 1) block_scaled_sums(Job job) {
  using Sums = BlockScaledSums<Tiles>;
  auto& s = *cuda_common::swizzled_shared<typename Sums::Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  if (warp == kProductWarp) {
    ptx::tcgen05::alloc(&s.tensor_memory, Sums::Plan::kAllocated);
    ptx::tcgen05::relinquish_alloc_permit();
  }
  if (thread < Sums::Shared::kStages) s.full[thread].init(1), s.free[thread].init(1);
  if (thread < 2) s.sums_full[thread].init(1), s.sums_free[thread].init(kStoreThreads);
  ptx::tcgen05::fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05::fence_after_thread_sync();
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  Sums sums(tiles, s);
  if (warp < kStoreWarps) {
    sums.store();
  } else if (thread % kWarp == 0) {  // nobody else of these two warps has anything to do
    if (warp == kProductWarp) sums.multiply();
    if (warp == kCopyWarp) sums.copy();
  }
  __syncwarp();
  ptx::tcgen05::fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05::fence_after_thread_sync();
  if (warp == kProductWarp) ptx::tcgen05::dealloc(s.tensor_memory, Sums::Plan::kAllocated);
}

// On as many thread blocks as the GPU holds at once, at most.
template <class Tiles, class Job>
void launch_sums(const char* name, const device::Queue& queue, int64_t most_tiles, const Job& job) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most_tiles, cuda_common::multiprocessors()));
  cuda_common::launch(name, queue, block_scaled_sums<Tiles, Job>, dim3(blocks), kSumsThreads,
                      sizeof(typename BlockScaledSums<Tiles>::Shared), job);
}

}  // namespace tessera::backends::sm100
