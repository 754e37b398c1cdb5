// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 activations (docs/contracts/numerics.md, section 3) from BF16 rows, in the order in which they are multiplied
// (scaled_units.h). What bounds it: instructions, two products and two conversions of each value, since a row is read
// twice and the second time from a cache. Which rows, a class Map says (scaled_sums.cuh):
//   source(work, token)  the row's values, and where its scale g is given by a bound that (0: it is measured); called
//                        by all threads of a block
//   factor(work, token)  takes g
#include <cstdint>

#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/quantized_block.cuh"
#include "backends/sm120/scaled_units.h"
#include "numeric/bf16.h"

namespace tessera::backends::sm120 {

struct InputSource {
  const uint16_t* values;
  float bound;
};

constexpr int kInputThreads = 128;

// Codes of 16 neighbouring values, and their scale.
__device__ inline cuda_common::QuantizedBlock quantize_values(const uint16_t* values, float g) {
  const uint4* pieces = reinterpret_cast<const uint4*>(values);
  float floats[numeric::kNvfp4Block];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 piece = pieces[i];
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      floats[8 * i + j] = numeric::bf16_to_float(static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2)));
    }
  }
  return cuda_common::quantize_block(floats, numeric::abs_max(floats, numeric::kNvfp4Block), g);
}

// Grid: work by rows of a tile, those too that only fill a unit.
template <class Map>
__global__ void __launch_bounds__(kInputThreads) arrange_inputs(Map map) {
  cuda_common::wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= map.num_work()) return;
  const auto work = map.work(static_cast<int>(blockIdx.x));
  const int row = static_cast<int>(blockIdx.y), num_units = ceil_div<int>(work.count, InputUnit::kRows);
  if (row >= num_units * InputUnit::kRows) return;
  const bool is_there = row < work.count;
  const int width = map.width();
  InputSource source{};
  float g = 1;
  if (is_there) {
    source = map.source(work, row);
    const cuda_common::Values values{const_cast<uint16_t*>(source.values), true};
    g = cuda_common::activation_scale<kInputThreads>(values, 0, width, source.bound);
    if (threadIdx.x == 0) *map.factor(work, row) = g;
  }
  const int num_blocks = static_cast<int>(units_of_row(width)) * kUnitBlocks, in_unit = row % InputUnit::kRows;
  for (int block = static_cast<int>(threadIdx.x); block < num_blocks; block += kInputThreads) {
    cuda_common::QuantizedBlock found;
    const int column = block * numeric::kNvfp4Block;
    if (is_there && column < width) found = quantize_values(source.values + column, g);
    char* unit = map.inputs(work) + (block / kUnitBlocks * num_units + row / InputUnit::kRows) * InputUnit::kBytes;
    const int in_row = block % kUnitBlocks, first = in_row * numeric::kNvfp4Block;
    *reinterpret_cast<uint32_t*>(unit + InputUnit::codes_at(in_unit, first)) = static_cast<uint32_t>(found.codes);
    *reinterpret_cast<uint32_t*>(unit + InputUnit::codes_at(in_unit, first + kWordCodes)) =
        static_cast<uint32_t>(found.codes >> 32);
    unit[InputUnit::scale_at(in_unit, in_row)] = static_cast<char>(found.scale);
  }
}

// For at most `most_work` tiles of at most `tile_tokens`; source() has so much dynamic shared memory.
template <class Map>
void launch_arrange(const char* name, const device::Queue& queue, int64_t most_work, int64_t tile_tokens,
                    const Map& map, int64_t shared_bytes = 0) {
  const dim3 rows(static_cast<unsigned>(most_work),
                  static_cast<unsigned>(round_up<int64_t>(tile_tokens, InputUnit::kRows)));
  cuda_common::launch(name, queue, arrange_inputs<Map>, rows, kInputThreads, static_cast<size_t>(shared_bytes), map);
}

}  // namespace tessera::backends::sm120
