// SPDX-License-Identifier: Apache-2.0
// What linear_chunks.h says. What bounds it: a tile is 4 stages of inputs, so latency, and the chunk sums, which are
// written and read once (sum_plans.h keeps them in L2).
#include "backends/sm90/linear_chunks.h"

#include <algorithm>

#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/workspace.h"
#include "backends/sm90/arranged_tokens.h"
#include "backends/sm90/wide_sums.cuh"
#include "ops/linear_group/linear_group.h"

namespace tessera::backends::sm90 {

namespace {

using cuda_common::FastDivisor, cuda_common::Values, cuda_common::wait_for_previous;
using ops::WeightFormat;

constexpr int kTileRows = Wide::kTileRows;  // whatever the weights
constexpr int kRowsAtOnce = 4, kAddThreads = 256;

struct ChunkMap {
  int32_t tiles_end;        // of its tiles in those of all maps
  int32_t first_row, rows;  // of all maps' rows
  const char* data;
  const float* scales;  // FP8's, of blocks
  float tensor_scale;
  Values y;  // [tokens, rows]
};

struct ChunkJob {
  ArrangedTokens inputs;
  float* sums;  // [chunks][tokens][rows of all maps]
  ChunkMap maps[ops::LinearGroup::kMostMaps];
  int32_t num_tiles, num_rows, num_chunks, token_tiles;
  int64_t in, num_tokens;
  FastDivisor quads;  // kRowsAtOnce of a token's rows that are stored
  float limit;        // of swiglu
};

// Map by map, then chunks, token tiles, row tiles: blocks at work share inputs.
template <WeightFormat kWeightFormat, bool kWeightsFold, int kProductTokens>
class ChunkTiles {
 public:
  static constexpr WeightFormat kFormat = kWeightFormat;
  static constexpr bool kFolds = kWeightsFold;
  static constexpr int kTileTokens = kProductTokens;
  static constexpr bool kKnowsWeights = true;
  using Layout = cuda_common::PackedUnit<kFormat>;
  using Share = typename WideOf<kFormat, kFolds>::Share;
  struct Place {
    int map, chunk, first_row, first_token;
  };
  __device__ explicit ChunkTiles(const ChunkJob& job) : job_(job) {}

  __device__ int width() const { return kChunk; }
  __device__ int last_unit_blocks() const { return Layout::kBlocks; }
  __device__ int count() const { return job_.num_tiles; }
  __device__ Place place(int tile) const {
    int map = 0, begin = 0;
    while (tile >= job_.maps[map].tiles_end) begin = job_.maps[map++].tiles_end;
    const int row_tiles = (job_.maps[map].rows + kTileRows - 1) / kTileRows, in_map = tile - begin;
    const int rows = in_map % row_tiles, others = in_map / row_tiles;
    return {map, others / job_.token_tiles, rows * kTileRows, others % job_.token_tiles * job_.inputs.tile_tokens};
  }
  __device__ const char* unit(const Place& place, int slot) const {
    const ChunkMap& map = job_.maps[place.map];
    const int row = place.first_row + slot * Layout::kRows;
    return row < map.rows ? map.data + Layout::offset(row, column(place), job_.in) : nullptr;
  }
  __device__ const float* block_scales(const Place& place, int slot) const {
    const ChunkMap& map = job_.maps[place.map];
    const int row = min(place.first_row + slot * Layout::kRows, map.rows - 1);
    return map.scales + cuda_common::packed_scale_at(row, column(place), job_.in);
  }
  __device__ const char* inputs(const Place& place) const {
    constexpr int kBlocks = kChunk / ProductInputs::kColumns;
    return job_.inputs.tile(0, place.first_token) +
           static_cast<int64_t>(place.chunk * kBlocks) * ProductInputs::stride(tokens(place));
  }
  __device__ int tokens(const Place& place) const { return job_.inputs.tokens_of(place.first_token); }
  __device__ Share share(const typename WideOf<kFormat, kFolds>::Weights& stage, int block, int part, int warp,
                         int lane) const {
    return stage.template share_of<Share>(warp, block, part, lane);
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    const ChunkMap& map = job_.maps[place.map];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {  // ptx/wgmma.cuh: rows of 8, tokens of 8
      const int row = place.first_row + warp * Layout::kRows + i % 4 / 2 * 8 + lane / 4;
      const int64_t token = place.first_token + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (row >= map.rows || token >= job_.num_tokens) continue;
      job_.sums[(place.chunk * job_.num_tokens + token) * job_.num_rows + map.first_row + row] = sums[i];
    }
  }

 private:
  __device__ static int64_t column(const Place& place) {
    return static_cast<int64_t>(place.chunk) * kChunk;
  }

  const ChunkJob& job_;
};

// The sums of four rows of a token, from a map's row on, as they are stored: chunk sums in ascending order, scaled.
struct Quad {
  float values[kRowsAtOnce];
};
__device__ Quad add_quad(const ChunkJob& job, const ChunkMap& map, int64_t token, int row, float factor) {
  const int64_t stride = job.num_tokens * job.num_rows / kRowsAtOnce;  // of chunks
  const float4* at =
      reinterpret_cast<const float4*>(job.sums) + (token * job.num_rows + map.first_row + row) / kRowsAtOnce;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 8
  for (int chunk = 0; chunk < job.num_chunks; ++chunk) {
    const float4 part = at[chunk * stride];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  const auto scaled = [&](float value) { return value * factor * map.tensor_scale; };
  return {{scaled(sum.x), scaled(sum.y), scaled(sum.z), scaled(sum.w)}};
}

__device__ void store_quad(const ChunkMap& map, int64_t token, int row, const Quad& quad) {
  const int64_t at = (token * map.rows + row) / kRowsAtOnce;
  const float(&v)[kRowsAtOnce] = quad.values;
  if (map.y.is_bf16) {
    using cuda_common::ptx::bf16_pair;
    static_cast<uint2*>(map.y.data)[at] = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3])};
  } else {
    static_cast<float4*>(map.y.data)[at] = {v[0], v[1], v[2], v[3]};
  }
}

// A thread has four rows of a token; with kIsGated the same four of gate and up.
template <bool kIsGated>
__global__ void __launch_bounds__(kAddThreads) add_chunks(const __grid_constant__ ChunkJob job, float factor) {
  wait_for_previous();
  const auto item = static_cast<uint32_t>(cuda_common::item_index());
  const int64_t token = job.quads.quotient(item);
  if (token >= job.num_tokens) return;
  int row = static_cast<int>(item - static_cast<uint32_t>(token) * job.quads.divisor()) * kRowsAtOnce;
  if constexpr (kIsGated) {
    const ChunkMap &gate = job.maps[0], &up = job.maps[1];
    Quad gates = add_quad(job, gate, token, row, factor);
    const Quad ups = add_quad(job, up, token, row, factor);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      gates.values[i] = cuda_common::swiglu_value(cuda_common::round_to(true, gates.values[i]),
                                                  cuda_common::round_to(true, ups.values[i]), job.limit);
    }
    store_quad(gate, token, row, gates);
  } else {
    int map = 0;
    while (row >= job.maps[map].rows) row -= job.maps[map++].rows;
    store_quad(job.maps[map], token, row, add_quad(job, job.maps[map], token, row, factor));
  }
}

void run(WeightFormat weight_format, bool scales_fold, const ChunkJob& job, bool is_gated, const device::Queue& queue) {
  with_wide_tiles(weight_format, scales_fold, job.inputs.tile_tokens, [&](auto format, auto folds, auto tokens) {
    launch_wide<ChunkTiles<format.value, folds.value, tokens.value>>("linear_chunks", queue, job.num_tiles, job);
    const int64_t items = job.num_tokens * job.quads.divisor();
    cuda_common::launch("add_chunks", queue, is_gated ? add_chunks<true> : add_chunks<false>,
                        cuda_common::grid_for(items, kAddThreads), kAddThreads, 0, job,
                        cuda_common::PackedShare<format.value>::kFactor);
  });
}

// The workspace: inputs, then sums.
struct Places {
  char* arranged;
  float* sums;
  int64_t bytes;
};
Places places_of(std::span<const ops::Linear::Desc> maps, int64_t num_tokens, void* base) {
  cuda_common::Workspace workspace(base);
  const int64_t in = maps.front().in;
  Places places{};
  places.arranged = workspace.take<char>(ArrangedTokens::bytes(1, num_tokens, in));
  places.sums = workspace.take<float>(chunk_sums_of(maps, num_tokens));
  places.bytes = workspace.used();
  return places;
}

}  // namespace

int64_t linear_chunks_workspace(std::span<const ops::Linear::Desc> maps, int64_t max_tokens) {
  const int64_t tokens = most_chunk_tokens(maps, max_tokens);
  return tokens == 0 ? 0 : places_of(maps, tokens, nullptr).bytes;
}

void linear_chunks(const ChunkedMaps& all, int32_t tile_tokens, device::Queue& queue) {
  const Places places = places_of(all.maps, all.num_tokens, all.workspace);
  ChunkJob job{};
  job.in = all.maps.front().in, job.num_tokens = all.num_tokens;
  job.inputs = {static_cast<const uint16_t*>(all.x.data), places.arranged, job.in, 1, all.num_tokens, tile_tokens};
  job.sums = places.sums;
  job.num_chunks = static_cast<int32_t>(job.in / kChunk);
  job.token_tiles = static_cast<int32_t>(ceil_div<int64_t>(all.num_tokens, tile_tokens));
  for (size_t i = 0; i < all.maps.size(); ++i) {
    const auto rows = static_cast<int32_t>(all.maps[i].out);
    const ops::WeightView& weight = all.weights[i];
    job.num_tiles += ceil_div(rows, kTileRows) * job.num_chunks * job.token_tiles;
    job.maps[i] = {job.num_tiles,
                   job.num_rows,
                   rows,
                   static_cast<const char*>(weight.data),
                   static_cast<const float*>(weight.block_scales),
                   weight.tensor_scale,
                   cuda_common::values_of(all.y[i])};
    job.num_rows += rows;
  }
  const int32_t stored_rows = all.swiglu != nullptr ? job.maps[0].rows : job.num_rows;
  job.quads = FastDivisor(static_cast<uint32_t>(stored_rows / kRowsAtOnce));
  if (all.swiglu != nullptr) job.limit = all.swiglu->limit;
  arrange_tokens(job.inputs, queue);
  run(all.maps.front().format, all.weights[0].scales_fold, job, all.swiglu != nullptr, queue);
}

}  // namespace tessera::backends::sm90
