// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps with NVFP4 weights and NVFP4 inputs on Blackwell's tensor cores. What bounds it: few tokens the
// read of the weights, many the products. Weights are the operand of 128 rows, tokens the N columns, 8 to kTokens of
// them: so few tokens cost no more than they are. A tile's sums are one chain of products from zero in ascending
// columns, 64 at a time: they depend neither on the tile's tokens nor on who else is in it.
//   tile      128 rows of each of kMatrices matrices by up to kTokens tokens; a thread block takes tile after tile, or
//             a pair of them (kBlocks 2, a cluster) one of 256 rows: each brings its own rows and half of the inputs'
//             codes, half of their scales for both, and the even one gives the products of both; or two pairs (4) one
//             of 512 rows: each block brings what inputs it shares with others for them too
//   warp 5    brings 256 columns at a time by bulk copies, kStages ahead, over tiles too
//   warp 4    one thread issues copies of scales, products and commits; two sets of sums, so that products of the
//             next tile run while those of the last are stored, and two of scales (tensor_plan.h: where they do not fit
//             sets of sums overlap and scales have one); of a pair's odd block it says to the even one which stages are
//             full
//   warps 0-3 take sums from tensor memory, a row each thread, and store them
// What the tiles of a launch are, a class Tiles says:
//   kMatrices, kTokens, kBlocks  constants; of tokens a tile has a multiple of 8, of 16 where kBlocks is more than 1
//   width(), count()       columns; tiles
//   place(tile, rank)      what all else about this block's part of a tile is worked out from
//   weights(place, i)      the first packed tile of its rows in matrix i (packed_tiles.h)
//   inputs(place)          its input tile (input_tiles.cuh)
//   tokens(place)          1 to kTokens; inputs are those up to such a multiple
//   store(place, row, first_token, sums)
//                          takes sums[i][j] of matrix i and token first_token + j, of row 0 to 127; by warps as one
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/clusters.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
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

template <int kMatrices, int kTokens, int kBlocks>
struct SumsShared {
  struct Stage {  // 256 columns
    char weights[kMatrices][PackedTile::kBytes];
    char inputs[SumsPlan<kMatrices, kTokens, kBlocks>::kInputBytes];
  };
  static constexpr int kStages = SumsPlan<kMatrices, kTokens, kBlocks>::kStages;
  static constexpr int kPair = SumsPlan<kMatrices, kTokens, kBlocks>::kPair;
  static constexpr int kPairs = SumsPlan<kMatrices, kTokens, kBlocks>::kPairs;
  static_assert(sizeof(Stage) == SumsPlan<kMatrices, kTokens, kBlocks>::kStageBytes);

  Stage stages[kStages];
  ptx::SharedBarrier full[kStages], free[kStages];
  ptx::SharedBarrier sums_full[2], sums_free[2];
  uint32_t tensor_memory;
};

template <class Tiles>
class BlockScaledSums {
 public:
  using Shared = SumsShared<Tiles::kMatrices, Tiles::kTokens, Tiles::kBlocks>;
  using Plan = TensorPlan<Tiles::kMatrices, Tiles::kTokens>;

  static constexpr int kPair = Shared::kPair, kPairs = Shared::kPairs;

  __device__ BlockScaledSums(const Tiles& tiles, Shared& s, int rank)
      : tiles_(tiles), s_(s), rank_(rank), memory_(s.tensor_memory) {}

  // By one thread.
  __device__ void copy() {
    RingPlace<Shared::kStages> at;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step()) {
      const auto place = tiles_.place(tile, rank_);
      const int tokens = padded_tokens(place), stage_bytes = InputTile::stage_bytes(tokens);
      const int code_bytes = InputTile::code_bytes(tokens / kPair), scale_bytes = InputTile::scale_bytes(tokens);
      const char* inputs = tiles_.inputs(place);
      for (int stage = 0; stage < num_stages(); ++stage, at.advance(), inputs += stage_bytes) {
        ptx::SharedBarrier& full = s_.full[at.stage];
        s_.free[at.stage].wait(at.parity ^ 1);
        full.arrive_and_expect(kMatrices * PackedTile::kBytes + code_bytes + scale_bytes);
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
          ptx::copy_bulk(s_.stages[at.stage].weights[i],
                         tiles_.weights(place, i) + static_cast<int64_t>(stage) * PackedTile::kBytes,
                         PackedTile::kBytes, full);
        }
        char* to = s_.stages[at.stage].inputs;
        if constexpr (kBlocks == 1) {
          ptx::copy_bulk(to, inputs, code_bytes + scale_bytes, full);
        } else {
          copy_inputs(to, inputs, code_bytes, scale_bytes, full);
        }
      }
    }
    // The last arrivals have to find this block: commits' come in no order, so that of the sums may be there before.
    for (int i = 0; i < Shared::kStages; ++i, at.advance()) s_.free[at.stage].wait(at.parity ^ 1);
  }

  // By one thread of a pair's even block, or of the one block.
  __device__ void multiply() {
    RingPlace<Shared::kStages> at;
    RingPlace<2> sums;
    int scale_set = 0;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step(), sums.advance()) {
      const int tokens = padded_tokens(tiles_.place(tile, rank_));
      if constexpr (Plan::kOverlaps) {  // what this set shares with that of the tile before
        wait(s_.sums_free[sums.stage ^ 1], sums.stage == 0 ? sums.parity ^ 1 : sums.parity);
      } else {
        wait(s_.sums_free[sums.stage], sums.parity ^ 1);
      }
      for (int stage = 0; stage < num_stages(); ++stage, at.advance()) {
        wait(s_.full[at.stage], at.parity);
        ptx::tcgen05::fence_after_thread_sync();
        multiply_stage(s_.stages[at.stage], sums.stage, scale_set, tokens, stage > 0);
        ptx::tcgen05::commit<kPair>(s_.free[at.stage], kAllBlocks);
        scale_set = (scale_set + 1) % Plan::kScaleSets;
      }
      ptx::tcgen05::commit<kPair>(s_.sums_full[sums.stage], blocks_of_pair());
    }
  }

  // By one thread of a pair's odd block: bulk copies count at a barrier of their own block alone, so somebody has to
  // pass on that they are there.
  __device__ void pass_on() {
    RingPlace<Shared::kStages> at;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step()) {
      for (int stage = 0; stage < num_stages(); ++stage, at.advance()) {
        s_.full[at.stage].wait(at.parity);
        ptx::show_to_products();  // which the other block's thread begins
        ptx::arrive_at(s_.full[at.stage], even_block());
      }
    }
  }

  // By kStoreThreads threads.
  __device__ void store() {
    RingPlace<2> sums;
    for (int tile = first_tile(); tile < tiles_.count(); tile += tile_step(), sums.advance()) {
      const auto place = tiles_.place(tile, rank_);
      const int tokens = padded_tokens(place);
      s_.sums_full[sums.stage].wait(sums.parity);
      ptx::tcgen05::fence_after_thread_sync();
      if constexpr (Plan::kOverlaps) {
        store_shared_first(place, sums.stage, tokens);
      } else {
        store_tile(place, sums.stage, 0, tokens, true);
      }
    }
  }

 private:
  static constexpr int kMatrices = Tiles::kMatrices, kBlocks = Tiles::kBlocks;
  // Bits for ranks.
  static constexpr uint32_t kAllBlocks = (1u << kBlocks) - 1, kEvenBlocks = kAllBlocks / 3;

  __device__ static int first_tile() {
    return static_cast<int>(blockIdx.x) / kBlocks;
  }
  __device__ static int tile_step() {
    return static_cast<int>(gridDim.x) / kBlocks;
  }
  // Of this block's pair: its even block, and both, a bit for each rank.
  __device__ int even_block() const {
    return rank_ & ~1;
  }
  __device__ uint32_t blocks_of_pair() const {
    return 3u << even_block();
  }
  // Of a stage of a pair's inputs, `code_bytes` of codes behind each other for each of its blocks, then scales. Scales
  // are all blocks': each brings a part of them for all. Codes are those of the blocks at this place of each pair:
  // each brings a part for these. A place that is free here is free everywhere, for products of all pairs have said so.
  __device__ void copy_inputs(char* to, const char* inputs, int code_bytes, int scale_bytes,
                              ptx::SharedBarrier& full) const {
    const int side = rank_ % kPair, codes = code_bytes / kPairs, first_code = rank_ / kPair * codes;
    const char* const side_codes = inputs + side * code_bytes;
    if constexpr (kPairs == 1) {
      ptx::copy_bulk(to, side_codes, codes, full);
    } else {
      ptx::copy_bulk_to(kEvenBlocks << side, to + first_code, side_codes + first_code, codes, full);
    }
    const int scales = scale_bytes / kBlocks, first_scale = code_bytes + rank_ * scales;
    ptx::copy_bulk_to(kAllBlocks, to + first_scale, inputs + (kPair - 1) * code_bytes + first_scale, scales, full);
  }
  template <class Place>
  __device__ int padded_tokens(const Place& place) const {
    return round_up<int>(tiles_.tokens(place), InputTile::kGroup * kPair);
  }
  // Where threads of other blocks arrive. (Commits of its products need none: tensor memory has fences of its own.)
  __device__ static void wait(ptx::SharedBarrier& barrier, int parity) {
    if constexpr (kBlocks == 1) {
      barrier.wait(parity);
    } else {
      ptx::wait_for_cluster(barrier, parity);
    }
  }
  __device__ int num_stages() const {
    return static_cast<int>(PackedTile::tiles_of_row(tiles_.width()));
  }

  __device__ void multiply_stage(const typename Shared::Stage& stage, int sums, int scale_set, int tokens, bool adds) {
    using cuda_common::ScaleAtom, cuda_common::advance_descriptor, cuda_common::codes_descriptor;
    const uint32_t instruction = cuda_common::nvfp4_instruction(PackedTile::kRows * kPair, tokens);
    const uint32_t inputs = ptx::shared_address(stage.inputs), memory = memory_;
    const int code_bytes = InputTile::code_bytes(tokens / kPair), num_atoms = InputTile::atoms(tokens);
    const auto copy_scales = [&](uint32_t atom, uint32_t columns) {
      ptx::tcgen05::cp_scales<kPair>(memory + columns, cuda_common::scales_descriptor(atom));
    };
#pragma unroll
    for (int product = 0; product < PackedTile::kProducts; ++product) {
      const int bytes = product * cuda_common::Nvfp4Product::kBytes;
      for (int atom = 0; atom < num_atoms; ++atom) {
        copy_scales(inputs + static_cast<uint32_t>(code_bytes + (product * num_atoms + atom) * ScaleAtom::kBytes),
                    Plan::scales(scale_set, kMatrices, product) + static_cast<uint32_t>(atom * ScaleAtom::kColumns));
      }
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        const uint32_t weights = ptx::shared_address(stage.weights[i]);
        copy_scales(weights + static_cast<uint32_t>(PackedTile::kCodeBytes + product * ScaleAtom::kBytes),
                    Plan::scales(scale_set, i, product));
        ptx::tcgen05::mma_nvfp4<kPair>(memory + Plan::sums(sums, i),
                                       advance_descriptor(codes_descriptor(weights), bytes),
                                       advance_descriptor(codes_descriptor(inputs), bytes), instruction,
                                       memory + Plan::scales(scale_set, i, product),
                                       memory + Plan::scales(scale_set, kMatrices, product), adds || product > 0);
      }
    }
  }

  static constexpr int kMost = 16, kRest = 8;  // tokens of a load; all tiles have a multiple of kRest
  // Sums of kCount tokens of this thread's row, as they are loaded.
  template <int kCount>
  using Loaded = uint32_t[kMatrices][kCount];

  __device__ static int store_row() {
    return static_cast<int>(threadIdx.x) % kStoreThreads;
  }

  // Sums that lie in the other set's columns are read before the others, so that its products may begin; when they
  // begin this set again, all of it has been read: the other set's have come after.
  template <class Place>
  __device__ void store_shared_first(const Place& place, int set, int tokens) {
    static_assert(Plan::kSharedColumns % kMost == 0 && Tiles::kTokens % kMost == 0);
    const int first = Plan::first_shared(set), end = min(first + Plan::kSharedColumns, tokens);
    const int other = first > 0 ? 0 : end, other_end = first > 0 ? min(first, tokens) : tokens;
    if constexpr (kMatrices == 1) {
      load_then_store(place, set, first, tokens);
      if (other < other_end) store_tile(place, set, other, other_end, false);
    } else {  // more than registers hold beside what is made of them: stored as they come
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const bool is_shared = part == 0;
        const int from = is_shared ? first : other, to = is_shared ? end : other_end;
        if (from < to) {
          store_tile(place, set, from, to, is_shared);
        } else if (is_shared) {
          give_back(set);
        }
      }
    }
  }

  // Of kSharedColumns tokens from `first`, before any is stored.
  template <class Place>
  __device__ void load_then_store(const Place& place, int set, int first, int tokens) {
    constexpr int kParts = Plan::kSharedColumns / kMost;
    Loaded<kMost> parts[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i * kMost < tokens) load(parts[i], set, first + i * kMost);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i * kMost < tokens) wait_for(parts[i]);
    }
    give_back(set);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i * kMost < tokens) store_some(place, first + i * kMost, parts[i]);
    }
  }

  // Of tokens from `first`, a multiple of kMost, to `tokens`: while some are stored the next ones are on their way;
  // when the last have come, the set is free if it `gives_back`.
  template <class Place>
  __device__ void store_tile(const Place& place, int set, int first, int tokens, bool gives_back) {
    Loaded<kMost> even, odd;
    Loaded<kRest> rest;
    const int whole = tokens / kMost * kMost;
    if (first < whole) {
      load(even, set, first);
    } else if (first < tokens) {
      load(rest, set, first);
    }
    const auto take = [&](Loaded<kMost>& now, Loaded<kMost>& next, int token) {
      wait_for(now);
      if (token + kMost < whole) {
        load(next, set, token + kMost);
      } else if (whole < tokens) {
        load(rest, set, whole);
      } else if (gives_back) {
        give_back(set);
      }
      store_some(place, token, now);
    };
#pragma unroll 1
    for (int token = first; token < whole; token += 2 * kMost) {
      take(even, odd, token);
      if (token + kMost < whole) take(odd, even, token + kMost);
    }
    if (whole == tokens) return;
    wait_for(rest);
    if (gives_back) give_back(set);
    store_some(place, whole, rest);
  }

  template <int kCount>
  __device__ void load(Loaded<kCount>& bits, int set, int first_token) {
    const uint32_t lanes = static_cast<uint32_t>(store_row() / kWarp * kWarp) << 16;
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      ptx::tcgen05::ld(bits[i], memory_ + lanes + Plan::sums(set, i) + static_cast<uint32_t>(first_token));
    }
  }
  template <int kCount>
  __device__ void wait_for(Loaded<kCount>& bits) {
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) ptx::tcgen05::wait_ld(bits[i]);
  }
  template <int kCount, class Place>
  __device__ void store_some(const Place& place, int first_token, const Loaded<kCount>& bits) {
    float sums[kMatrices][kCount];
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[i][j] = __uint_as_float(bits[i][j]);
    }
    tiles_.store(place, store_row(), first_token, sums);
    __syncwarp();  // lanes without a row left early, and all read tensor memory as one
  }
  // Products of the tile after the next may begin.
  __device__ void give_back(int set) {
    ptx::tcgen05::fence_before_thread_sync();
    if (rank_ == even_block()) {
      s_.sums_free[set].arrive();
    } else {
      ptx::arrive_at(s_.sums_free[set], even_block());
    }
  }

  const Tiles& tiles_;
  Shared& s_;
  const int rank_;  // of the tile's blocks
  const uint32_t memory_;
};

// Also where shared memory and barriers of the tile's other blocks have to be there, or to be there still.
template <int kBlocks>
__device__ void sync_blocks() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    ptx::sync_cluster();
  }
}

template <class Tiles, class Job>
__global__ void __launch_bounds__(kSumsThreads, 1) block_scaled_sums(Job job) {
  using Sums = BlockScaledSums<Tiles>;
  constexpr int kBlocks = Tiles::kBlocks, kPair = Sums::kPair;
  auto& s = *cuda_common::swizzled_shared<typename Sums::Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int rank = kBlocks == 1 ? 0 : ptx::cluster_rank();
  if constexpr (kBlocks > 1) ptx::sync_cluster();  // all are there to allocate
  if (warp == kProductWarp) {
    ptx::tcgen05::alloc<kPair>(&s.tensor_memory, Sums::Plan::kAllocated);
    ptx::tcgen05::relinquish_alloc_permit<kPair>();
  }
  const bool is_even = rank % kPair == 0;
  if (thread < Sums::Shared::kStages) s.full[thread].init(is_even ? kPair : 1), s.free[thread].init(Sums::kPairs);
  if (thread < 2) s.sums_full[thread].init(1), s.sums_free[thread].init(kStoreThreads * kPair);
  ptx::tcgen05::fence_before_thread_sync();
  sync_blocks<kBlocks>();
  ptx::tcgen05::fence_after_thread_sync();
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  Sums sums(tiles, s, rank);
  if (warp < kStoreWarps) {
    sums.store();
  } else if (thread % kWarp == 0) {  // nobody else of these two warps has anything to do
    if (warp == kCopyWarp) {
      sums.copy();
    } else if (is_even) {
      sums.multiply();
    } else {
      sums.pass_on();
    }
  }
  __syncwarp();
  ptx::tcgen05::fence_before_thread_sync();
  sync_blocks<kBlocks>();
  ptx::tcgen05::fence_after_thread_sync();
  if (warp == kProductWarp) ptx::tcgen05::dealloc<kPair>(s.tensor_memory, Sums::Plan::kAllocated);
}

// Clusters of two pairs that are at work at once: a quarter of the multiprocessors, or fewer, since such a cluster has
// to find a place in one part of the GPU.
template <class Tiles, class Job>
int64_t clusters_at_once() {
  static constinit cuda_common::NumberOfGpu s_clusters;
  return s_clusters.get([] {
    return cuda_common::clusters_at_once(block_scaled_sums<Tiles, Job>, kSumsThreads,
                                         sizeof(typename BlockScaledSums<Tiles>::Shared), Tiles::kBlocks);
  });
}

// On as many thread blocks as the GPU holds at once, at most: `at_once` tiles.
template <class Tiles, class Job>
void launch_sums(const char* name, const device::Queue& queue, int64_t most_tiles, const Job& job, int64_t at_once) {
  const int64_t blocks = std::min<int64_t>(most_tiles, std::max<int64_t>(1, at_once));
  cuda_common::launch_clusters(name, queue, block_scaled_sums<Tiles, Job>,
                               dim3(static_cast<unsigned>(blocks * Tiles::kBlocks)), kSumsThreads,
                               sizeof(typename BlockScaledSums<Tiles>::Shared), Tiles::kBlocks, job);
}

}  // namespace tessera::backends::sm100
