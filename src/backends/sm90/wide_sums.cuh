// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of many tokens with packed NVFP4 weights: wgmma, weights decoded in registers as the A operand,
// so that each is decoded once for up to 128 tokens. Bit for bit the sums of cuda_common/mma_sums.cuh: the same sixteen
// products at a time, chains of even and odd steps, chunks of 512 columns in ascending order.
//   tile       128 rows (what rows are, Tiles says) by up to 128 tokens; a thread block takes tile after tile
//   consumers  two warpgroups, 64 rows each: a warp decodes 16 rows of 128 columns while products of the ones before
//   run producer   a warp that brings stages of 128 columns by bulk copies, a lane each stretch, ahead over tiles too
// What the tiles of a launch are, a class Tiles says:
//   width(), count()              columns, a multiple of 512; tiles
//   place(tile)                   what all else about a tile is worked out from
//   unit(place, slot)             column 0 of the packed unit that fills slot 0 to 7 of a stage; null: none, anything
//   there inputs(place), tokens(place)  arranged (arranged_inputs.cuh); 1 to 128 share(stage, block, warp, lane)   a
//   lane's codes of 128 columns, and its scales' codes in scales[0] store<kTokens>(place, warp, lane, sums)   of a
//   lane: sums[4 j + i] as ptx/wgmma.cuh says
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/ring_place.cuh"

namespace tessera::backends::sm90 {

namespace ptx = cuda_common::ptx;
using cuda_common::kChunk, cuda_common::kShareBlock, cuda_common::kWarp;
using cuda_common::PackedNvfp4;
using PackedShare = cuda_common::PackedShare<ops::WeightFormat::kNvfp4>;

struct Wide {
  static constexpr int kTokens = 128, kSlots = 8, kStages = 5, kTokenGroups = kTokens / ArrangedInputs::kRows;
  static constexpr int kConsumerWarps = kSlots, kThreads = (kConsumerWarps + 4) * kWarp;
  // 240 hold two chains and the sums, 64 each, and two steps' weights.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Inputs = ProductInputs;

  // 128 columns.
  struct Stage {
    static constexpr int kCodeBytes = 2 * PackedNvfp4::kLanes * PackedNvfp4::kPieceBytes;
    static constexpr int kScaleBytes = PackedNvfp4::kLanes * PackedNvfp4::kPieceBytes;  // of all 512
    char inputs[kTokenGroups][ArrangedInputs::kBytes];
    char codes[kSlots][kCodeBytes];
    char scales[kSlots][kScaleBytes];

    // `block`, of 128 columns, is the stage's own. Rows g (half 0) or g + 8.
    __device__ uint4 codes_of(int slot, int half, int block, int lane) const {
      return reinterpret_cast<const uint4*>(codes[slot])[half * PackedNvfp4::kLanes + lane];
    }
    // Rows g and g + 8, two scales each.
    __device__ uint32_t scales_of(int slot, int block, int lane) const {
      return reinterpret_cast<const uint32_t*>(scales[slot])[lane * 4 + block];
    }
  };
  struct Shared {
    Stage stages[kStages];
    ptx::SharedBarrier full[kStages], free[kStages];
  };
};

// The producer's warp. Lanes 0 to 7 bring codes, 8 to 15 scales, the others inputs of 8 tokens each.
template <class Tiles>
__device__ void produce_wide(const Tiles& tiles, Wide::Shared& s) {
  constexpr int kSlots = Wide::kSlots;
  using Stage = Wide::Stage;
  static_assert(2 * kSlots + Wide::kTokenGroups == kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, num_blocks = tiles.width() / kShareBlock;
  const bool is_codes = lane < kSlots, is_scales = !is_codes && lane < 2 * kSlots;
  const int bytes = is_codes ? Stage::kCodeBytes : is_scales ? Stage::kScaleBytes : ArrangedInputs::kBytes;
  RingPlace<Wide::kStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles.count(); tile += static_cast<int>(gridDim.x)) {
    const auto place = tiles.place(tile);
    const char* from = nullptr;
    if (is_codes || is_scales) {
      from = tiles.unit(place, lane % kSlots);
    } else if ((lane - 2 * kSlots) * ArrangedInputs::kRows < tiles.tokens(place)) {
      from = tiles.inputs(place) + (lane - 2 * kSlots) * ArrangedInputs::bytes(ArrangedInputs::kRows, tiles.width());
    }
    const int all_bytes = static_cast<int>(__reduce_add_sync(~0u, from == nullptr ? 0u : static_cast<unsigned>(bytes)));
    for (int block = 0; block < num_blocks; ++block, at.advance()) {
      Stage& stage = s.stages[at.stage];
      ptx::SharedBarrier& full = s.full[at.stage];
      s.free[at.stage].wait(at.parity ^ 1);
      if (lane == 0) full.arrive_and_expect(all_bytes);
      __syncwarp();
      if (from == nullptr) continue;
      constexpr int kBlocks = kChunk / kShareBlock, kScalesBegin = kBlocks * Stage::kCodeBytes;
      const int in_unit = is_codes ? block % kBlocks * Stage::kCodeBytes : kScalesBegin;
      char* to = is_codes    ? stage.codes[lane]
                 : is_scales ? stage.scales[lane % kSlots]
                             : stage.inputs[lane - 2 * kSlots];
      const int offset = lane < 2 * kSlots ? block / kBlocks * PackedNvfp4::kBytes + in_unit : block * bytes;
      ptx::copy_bulk(to, from + offset, bytes, full);
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
      const auto place = tiles_.place(tile);
      const int tokens = tiles_.tokens(place);
      const bool is_last = tile + static_cast<int>(gridDim.x) >= tiles_.count();
      if (tokens > 64) {
        run_tile<Wide::kTokens>(place, is_last);
      } else if (tokens > 32) {
        run_tile<64>(place, is_last);
      } else {
        run_tile<32>(place, is_last);
      }
    }
  }

 private:
  // The share of the stage that at_ names.
  __device__ void load(int block) {
    s_.full[at_.stage].wait(at_.parity);
    next_ = tiles_.share(s_.stages[at_.stage], block, warp_, lane_);
  }

  // This warp needs the stage no more.
  __device__ void release(int stage) {
    if (lane_ == 0) s_.free[stage].arrive();
  }

  template <int kTokens, class Place>
  __device__ void run_tile(const Place& place, bool is_last) {
    constexpr int kBlocks = kChunk / kShareBlock, kSteps = kShareBlock / 32;
    constexpr int kSums = kTokens / 2;
    const int num_blocks = tiles_.width() / kShareBlock;
    float sums[kSums] = {}, chains[2][kSums];
    uint32_t operands[2][2][4];  // of two steps, two products each
    for (int begin = 0; begin < num_blocks; begin += kBlocks) {
      int before = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        PackedShare share = next_;
        share.prepare(next_.scales[0], cuda_common::has_e4m3_nan(next_.scales[0]));
        const int stage = at_.stage;
        const auto inputs = ptx::SharedOperand::of(s_.stages[stage].inputs, ArrangedInputs::kBytes);
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
            at_.advance();
            if (begin + b + 1 < num_blocks || !is_last) load((b + 1) % kBlocks);
          }
          if (b == kBlocks - 1 && step == kSteps - 1) {
            ptx::wait_for_products<0>();
          } else {
            ptx::wait_for_products<1>();
          }
          if (step == 0 && b > 0) release(before);
        }
        before = stage;
      }
      release(before);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += chains[0][i] + chains[1][i];
    }
    tiles_.template store<kTokens>(place, warp_, lane_, sums);
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
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp, lane_ = static_cast<int>(threadIdx.x) % kWarp;
  RingPlace<Wide::kStages> at_;
  PackedShare next_;
};

template <class Tiles, class Job>
__global__ void __launch_bounds__(Wide::kThreads, 1) wide_sums(Job job) {
  Wide::Shared& s = *cuda_common::swizzled_shared<Wide::Shared>();
  if (threadIdx.x < Wide::kStages) s.full[threadIdx.x].init(1), s.free[threadIdx.x].init(Wide::kConsumerWarps);
  __syncthreads();
  cuda_common::wait_for_previous();
  const Tiles tiles(job);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (warp >= Wide::kConsumerWarps) {
    ptx::give_registers_back<Wide::kProducerRegisters>();
    if (warp == Wide::kConsumerWarps) produce_wide(tiles, s);
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
