// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps with packed NVFP4 weights and NVFP4 inputs (scaled_units.h) by block-scaled products. Weights are
// the A operand, so that 8 tokens fill a product. The sums of a unit's 256 columns are one chain of four products from
// zero, and units' sums add in FP32 in ascending order: neither kernel, nor the number of tokens, changes a bit.
//   few   up to 8 kTiles tokens: what bounds it is the weights' read. A block has 16 rows (of each matrix), its warps
//         take units by turns, straight into registers
//   wide  up to 128 tokens: what bounds it are the products. A block takes tile after tile of 128 rows (those of both
//         matrices together) by 128 tokens; eight warps of 64 by 32 multiply, one copies ahead
// What is multiplied, a class Map says, which is a kernel's parameter:
//   kMatrices                   1, or 2 that have the same inputs and whose sums meet
//   width(), rows()             columns, and rows of a matrix
//   num_work(), work(i)         tiles of tokens; each has `count` tokens at least
//   inputs(work)                a tile of inputs
//   unit(work, matrix, row)     the first unit of rows [row, row + 16), a multiple of 16
//   store(work, row, token, sums)
//                               takes a row's sums with each matrix
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/block_scaled_mma.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/registers.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm120/scaled_units.h"
#include "backends/sm120/sum_plans.h"

namespace tessera::backends::sm120 {

namespace ptx = cuda_common::ptx;

constexpr int kWarp = 32, kTileSums = WeightUnit::kRows * InputUnit::kRows;

// A lane's scales of a unit; of weights those of steps 2 pair and 2 pair + 1.
__device__ inline uint32_t weight_scales_of(const char* unit, int pair, int lane) {
  return reinterpret_cast<const uint32_t*>(unit + WeightUnit::kCodeBytes)[pair * kWarp + lane];
}
__device__ inline uint32_t input_scales_of(const char* unit, int lane) {
  return reinterpret_cast<const uint32_t*>(unit + InputUnit::kCodeBytes)[lane];
}

// sums += the products of step kStep of a unit; inputs and scales of weights are those of the two steps that it is one
// of.
template <int kStep>
__device__ void add_step(const uint4& weights, uint32_t weight_scales, const uint4& inputs, uint32_t input_scales,
                         float (&sums)[4]) {
  ptx::mma_nvfp4<kStep % 2, kStep>(sums, weights, kStep % 2 == 0 ? inputs.x : inputs.z,
                                   kStep % 2 == 0 ? inputs.y : inputs.w, weight_scales, input_scales);
}

// Row and token of sum `i` of a lane in 16 by 8.
__device__ inline int row_of_sum(int lane, int i) {
  return lane / 4 + i / 2 * 8;
}
__device__ inline int token_of_sum(int lane, int i) {
  return lane % 4 * 2 + i % 2;
}

using Few = FewPlan;

struct LaneWeights {
  uint4 codes[kSteps];
  uint32_t scales[kSteps / 2];
  __device__ void load(const char* unit, int lane) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      codes[step] = __ldcs(reinterpret_cast<const uint4*>(unit) + step * kWarp + lane);
    }
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) scales[pair] = weight_scales_of(unit, pair, lane);
  }
};

// The sums of a unit, from zero.
__device__ inline void sum_unit(const LaneWeights& weights, const char* inputs, int lane, float (&sums)[4]) {
  const uint4* codes = reinterpret_cast<const uint4*>(inputs) + lane;
  const uint4 first = codes[0], second = codes[kWarp];
  const uint32_t scales = input_scales_of(inputs, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0;
  add_step<0>(weights.codes[0], weights.scales[0], first, scales, sums);
  add_step<1>(weights.codes[1], weights.scales[0], first, scales, sums);
  add_step<2>(weights.codes[2], weights.scales[1], second, scales, sums);
  add_step<3>(weights.codes[3], weights.scales[1], second, scales, sums);
}

// Grid: work by tiles of 16 rows.
template <class Map, int kTiles>
__global__ void __launch_bounds__(Few::kThreads, 2) few_sums(Map map) {
  constexpr int kMatrices = Map::kMatrices, kSums = kTiles * kTileSums;  // of a matrix
  constexpr int kOwned = (kSums + Few::kThreads - 1) / Few::kThreads;
  __shared__ float s_parts[Few::kWarps][kMatrices][kSums];  // units' sums, as lanes hold them
  cuda_common::wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int row_tiles = ceil_div<int>(map.rows(), WeightUnit::kRows);
  const int index = static_cast<int>(blockIdx.x) / row_tiles;
  const int first_row = (static_cast<int>(blockIdx.x) - index * row_tiles) * WeightUnit::kRows;
  if (index >= map.num_work()) return;
  const auto work = map.work(index);
  const int num_units = static_cast<int>(units_of_row(map.width()));
  const int num_tiles = ceil_div<int>(work.count, InputUnit::kRows);
  const char* inputs = map.inputs(work);
  LaneWeights next[kMatrices];
  const auto load_next = [&](int unit) {
    if (unit >= num_units) return;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) next[m].load(map.unit(work, m, first_row) + unit * WeightUnit::kBytes, lane);
  };
  load_next(warp);
  float sums[kOwned][kMatrices] = {};
  for (int begin = 0; begin < num_units; begin += Few::kWarps) {
    const int unit = begin + warp;
    if (unit < num_units) {
      LaneWeights weights[kMatrices];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) weights[m] = next[m];
      load_next(unit + Few::kWarps);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= num_tiles) break;
        const char* tile_inputs = inputs + (unit * num_tiles + tile) * InputUnit::kBytes;
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          float parts[4];
          sum_unit(weights[m], tile_inputs, lane, parts);
#pragma unroll
          for (int i = 0; i < 4; ++i) s_parts[warp][m][tile * kTileSums + i * kWarp + lane] = parts[i];
        }
      }
    }
    __syncthreads();
    const int num_parts = min(Few::kWarps, num_units - begin);
#pragma unroll
    for (int n = 0; n < kOwned; ++n) {
      const int at = n * Few::kThreads + thread;
      if (at >= num_tiles * kTileSums) break;
      for (int part = 0; part < num_parts; ++part) {
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) sums[n][m] += s_parts[part][m][at];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kOwned; ++n) {
    const int at = n * Few::kThreads + thread, i = at / kWarp % 4;
    const int row = first_row + row_of_sum(at % kWarp, i);
    const int token = at / kTileSums * InputUnit::kRows + token_of_sum(at % kWarp, i);
    if (row < map.rows() && token < work.count) map.store(work, row, token, sums[n]);
  }
}

struct Wide : WidePlan {
  // 232 hold a unit's sums and the totals, 64 each, and operands.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // 256 columns.
  struct Stage {
    char weights[kWeightUnits][WeightUnit::kBytes];
    char inputs[kInputUnits][InputUnit::kBytes];
  };
  static_assert(sizeof(Stage) == kStageBytes);
  struct Shared {
    Stage stages[kStages];
    ptx::SharedBarrier full[kStages], free[kStages];
  };
  static_assert(sizeof(Shared) <= 99 << 10, "what a block has on compute capability 12");
};

// Which rows of which matrix a tile's units of weights are: each half of a tile, four units, has rows of all matrices.
template <int kMatrices>
struct WideRows {
  static constexpr int kTileRows = Wide::kRows / kMatrices, kHalfUnits = Wide::kWarpUnits / kMatrices;
  __device__ static int matrix_of(int unit) { return unit % Wide::kWarpUnits / kHalfUnits; }
  __device__ static int row_of(int unit) {
    return (unit / Wide::kWarpUnits * kHalfUnits + unit % kHalfUnits) * WeightUnit::kRows;
  }
};

// The warp that copies: a lane each unit of weights, and one the inputs.
template <class Map>
__device__ void produce_wide(const Map& map, int row_tiles, Wide::Shared& s) {
  using Rows = WideRows<Map::kMatrices>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, num_units = static_cast<int>(units_of_row(map.width()));
  const int num_tiles = map.num_work() * row_tiles;
  const bool is_inputs = lane == Wide::kWeightUnits;
  cuda_common::RingPlace<Wide::kStages> at;
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    const auto work = map.work(tile / row_tiles);
    const int row = tile % row_tiles * Rows::kTileRows + Rows::row_of(lane);
    const char* from = nullptr;
    int bytes = 0;
    if (is_inputs) {
      from = map.inputs(work), bytes = ceil_div<int>(work.count, InputUnit::kRows) * InputUnit::kBytes;
    } else if (lane < Wide::kWeightUnits && row < map.rows()) {
      from = map.unit(work, Rows::matrix_of(lane), row), bytes = WeightUnit::kBytes;
    }
    const int all_bytes = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(bytes)));
    for (int unit = 0; unit < num_units; ++unit, at.advance(), from += bytes) {
      Wide::Stage& stage = s.stages[at.stage];
      s.free[at.stage].wait(at.parity ^ 1);
      if (lane == 0) s.full[at.stage].arrive_and_expect(all_bytes);
      __syncwarp();
      if (bytes == 0) continue;
      ptx::copy_bulk(is_inputs ? stage.inputs[0] : stage.weights[lane], from, bytes, s.full[at.stage]);
    }
  }
}

// A warp that multiplies.
class WideConsumer {
 public:
  __device__ explicit WideConsumer(Wide::Shared& s)
      : s_(s),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        half_(static_cast<int>(threadIdx.x) / kWarp / Wide::kWarpUnits),
        quarter_(static_cast<int>(threadIdx.x) / kWarp % Wide::kWarpUnits) {}

  template <class Map>
  __device__ void run(const Map& map, int row_tiles) {
    const int num_units = static_cast<int>(units_of_row(map.width())), num_tiles = map.num_work() * row_tiles;
    for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
      const auto work = map.work(tile / row_tiles);
      const bool has_tokens = quarter_ * Wide::kWarpUnits * InputUnit::kRows < work.count;
      Sums totals = {};
      for (int unit = 0; unit < num_units; ++unit, at_.advance()) {
        s_.full[at_.stage].wait(at_.parity);
        if (has_tokens) add_unit(s_.stages[at_.stage], totals);
        __syncwarp();
        if (lane_ == 0) s_.free[at_.stage].arrive_behind(word_of(totals));
      }
      if (has_tokens) store(map, work, tile % row_tiles * WideRows<Map::kMatrices>::kTileRows, totals);
    }
  }

 private:
  using Sums = float[Wide::kWarpUnits][Wide::kWarpUnits][4];

  // Of products of all of a unit's weights and inputs.
  __device__ static uint32_t word_of(const Sums& totals) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < Wide::kWarpUnits; ++i) {
      word |= __float_as_uint(totals[i][0][0]) | __float_as_uint(totals[0][i][0]);
    }
    return word;
  }

  // Inputs that are not there are whatever the stage held before: their sums are not stored.
  __device__ void add_unit(const Wide::Stage& stage, Sums& totals) const {
    Sums sums = {};
    uint32_t input_scales[Wide::kWarpUnits];
#pragma unroll
    for (int n = 0; n < Wide::kWarpUnits; ++n) input_scales[n] = input_scales_of(inputs_of(stage, n), lane_);
    multiply<0>(stage, input_scales, sums);
    multiply<1>(stage, input_scales, sums);
#pragma unroll
    for (int u = 0; u < Wide::kWarpUnits; ++u) {
#pragma unroll
      for (int n = 0; n < Wide::kWarpUnits; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[u][n][i] += sums[u][n][i];
      }
    }
  }
  __device__ const char* weights_of(const Wide::Stage& stage, int u) const {
    return stage.weights[half_ * Wide::kWarpUnits + u];
  }
  __device__ const char* inputs_of(const Wide::Stage& stage, int n) const {
    return stage.inputs[quarter_ * Wide::kWarpUnits + n];
  }
  // Steps 2 kPair and 2 kPair + 1.
  template <int kPair>
  __device__ void multiply(const Wide::Stage& stage, const uint32_t (&input_scales)[Wide::kWarpUnits],
                           Sums& sums) const {
    uint4 inputs[Wide::kWarpUnits];
#pragma unroll
    for (int n = 0; n < Wide::kWarpUnits; ++n) {
      inputs[n] = reinterpret_cast<const uint4*>(inputs_of(stage, n))[kPair * kWarp + lane_];
    }
#pragma unroll
    for (int u = 0; u < Wide::kWarpUnits; ++u) {
      const uint4* weights = reinterpret_cast<const uint4*>(weights_of(stage, u)) + 2 * kPair * kWarp + lane_;
      const uint4 first = weights[0], second = weights[kWarp];
      const uint32_t weight_scales = weight_scales_of(weights_of(stage, u), kPair, lane_);
#pragma unroll
      for (int n = 0; n < Wide::kWarpUnits; ++n) {
        add_step<2 * kPair>(first, weight_scales, inputs[n], input_scales[n], sums[u][n]);
      }
#pragma unroll
      for (int n = 0; n < Wide::kWarpUnits; ++n) {
        add_step<2 * kPair + 1>(second, weight_scales, inputs[n], input_scales[n], sums[u][n]);
      }
    }
  }
  template <class Map, class Work>
  __device__ void store(const Map& map, const Work& work, int first_row, const Sums& totals) const {
    using Rows = WideRows<Map::kMatrices>;
#pragma unroll
    for (int u = 0; u < Rows::kHalfUnits; ++u) {
#pragma unroll
      for (int n = 0; n < Wide::kWarpUnits; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + Rows::row_of(half_ * Wide::kWarpUnits + u) + row_of_sum(lane_, i);
          const int token = (quarter_ * Wide::kWarpUnits + n) * InputUnit::kRows + token_of_sum(lane_, i);
          if (row >= map.rows() || token >= work.count) continue;
          float sums[Map::kMatrices];
#pragma unroll
          for (int m = 0; m < Map::kMatrices; ++m) sums[m] = totals[m * Rows::kHalfUnits + u][n][i];
          map.store(work, row, token, sums);
        }
      }
    }
  }

  Wide::Shared& s_;
  const int lane_, half_, quarter_;
  cuda_common::RingPlace<Wide::kStages> at_;
};

template <class Map>
__global__ void __launch_bounds__(Wide::kThreads, 1) wide_sums(Map map) {
  Wide::Shared& s = *cuda_common::dynamic_shared<Wide::Shared>();
  if (threadIdx.x < Wide::kStages) s.full[threadIdx.x].init(1), s.free[threadIdx.x].init(Wide::kConsumers);
  __syncthreads();
  cuda_common::wait_for_previous();
  const int row_tiles = ceil_div<int>(map.rows(), WideRows<Map::kMatrices>::kTileRows);
  if (threadIdx.x >= Wide::kConsumers * kWarp) {
    ptx::give_registers_back<Wide::kProducerRegisters>();
    if (threadIdx.x / kWarp == Wide::kConsumers) produce_wide(map, row_tiles, s);
  } else {
    ptx::take_registers<Wide::kConsumerRegisters>();
    WideConsumer(s).run(map, row_tiles);
  }
}

// Launches, for at most `most_work` tiles of tokens.
template <int kTiles, class Map>
void launch_few(const char* name, const device::Queue& queue, int64_t most_work, int64_t rows, const Map& map) {
  const auto blocks = static_cast<unsigned>(most_work * ceil_div<int64_t>(rows, WeightUnit::kRows));
  cuda_common::launch(name, queue, few_sums<Map, kTiles>, dim3(blocks), Few::kThreads, 0, map);
}
template <class Map>
int64_t wide_tiles(int64_t most_work, int64_t rows) {
  return most_work * ceil_div<int64_t>(rows, WideRows<Map::kMatrices>::kTileRows);
}
template <class Map>
void launch_wide(const char* name, const device::Queue& queue, int64_t most_work, int64_t rows, const Map& map) {
  const int64_t blocks = std::min<int64_t>(wide_tiles<Map>(most_work, rows), cuda_common::multiprocessors());
  cuda_common::launch(name, queue, wide_sums<Map>, dim3(static_cast<unsigned>(blocks)), Wide::kThreads,
                      sizeof(Wide::Shared), map);
}

}  // namespace tessera::backends::sm120
