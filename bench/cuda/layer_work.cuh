// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a block's consumers do in a phase (layer_phases.cuh).
#include "bench/cuda/layer_phases.cuh"

namespace tessera::bench {

// Where 16 bytes, eight columns, of an input lie in shared memory.
__device__ inline int arranged_piece(int piece) {
  constexpr int kPieces = LaneInputs::kRowPlaces;
  return piece / kPieces * kPieces + LaneInputs::place_of(0, piece % kPieces / 16, piece % 4, piece % 16 / 4);
}

template <class Plan, Sync kSync>
__device__ void load_inputs(typename Plan::Shared& s, const Phase& phase, const BlockTiles& tiles, const uint4* in) {
  const int thread = static_cast<int>(threadIdx.x), log2_pieces = phase.log2_chunks + 6;
  if (phase.mixes_first) {
    mix_streams<Plan, kSync>(s.squares, in, phase.num_in, [&](int piece, const uint4& values) {
      if (piece >> log2_pieces == 0) s.x[arranged_piece(piece)] = values;
    });
    return;
  }
  const int own = tiles.num_inputs(phase), count = (own + tiles.num_routed_inputs(phase)) << log2_pieces;
  constexpr int kAtOnce = kInputPieces / Plan::kConsumers;
  uint4 loaded[kAtOnce];
  const uint4* at[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int i = thread + n * Plan::kConsumers, place = i >> log2_pieces;
    const int input = place < own ? tiles.first_input(phase) + place : tiles.first_routed_input(phase) + place - own;
    at[n] = in + (input << log2_pieces) + (i & ((1 << log2_pieces) - 1));
    loaded[n] = i < count ? __ldcg(at[n]) : uint4{0, 0, 0, 0};
  }
  await_values<kSync>(loaded, at);
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int i = thread + n * Plan::kConsumers;
    if (i >= count) continue;
    s.x[arranged_piece(i)] = loaded[n];  // whole inputs are whole stretches of 512 columns
  }
}

// The sums of 16 rows by 512 columns: those of token 0 of 8 that are all the same.
__device__ inline void sum_unit(const UnitStage<1>& stage, ptx::SharedBarrier& free, const uint4* x, float* s_part) {
  using Share = UnitStage<1>::Share;
  constexpr int kBlocks = kChunk / kShareBlock;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Share shares[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) shares[b] = stage.share_of(0, b, 0, lane);
  free.arrive();
  Chains chains = {};
  uint32_t carries[2] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint4 inputs[kShareColumns / 8];
#pragma unroll
    for (int i = 0; i < kShareColumns / 8; ++i) inputs[i] = x[LaneInputs::place_of(0, b, i, lane % 4)];
    shares[b].prepare(shares[b].scales[0]);
    carries[0] |= shares[b].carries[0], carries[1] |= shares[b].carries[1];
    add_block(shares[b], inputs, chains);
  }
  float sums[1][4];
  add_chains(chains, sums[0]);
  add_nans<Share>(carries, sums);
  if (lane % 4 == 0) s_part[lane / 4] = sums[0][0], s_part[lane / 4 + 8] = sums[0][2];
}

__device__ inline void store_pair(uint16_t* out, int at, float first, float second) {
  __stcg(reinterpret_cast<unsigned*>(out + at), ptx::round_to_bf16x2(first, second));
}

// A tile's rows from the sums of its chunks. Two neighbouring lanes' values are one word.
template <class Plan>
__device__ void store_tiles(const typename Plan::Shared& s, const Phase& phase, const BlockTiles& tiles,
                            uint16_t* out) {
  const int num_tiles = tiles.count + tiles.routed_count, chunks = 1 << phase.log2_chunks;
  const int rows = phase.is_gated ? 8 : 16, count = num_tiles * rows;
  const auto row_sum = [&](int tile, int row) {
    float sum = 0;
    for (int c = 0; c < chunks; ++c) sum += s.parts[tile * chunks + c][row];
    return sum * (UnitStage<1>::Share::kFactor * phase.scale);
  };
  for (int i = static_cast<int>(threadIdx.x); i < (count + 31) / 32 * 32; i += Plan::kConsumers) {
    const int tile = min(i, count - 1) / rows, row = i % rows;
    float value = row_sum(tile, row);
    if (phase.is_gated) value = value / (1 + __expf(-value)) * row_sum(tile, row + 8);
    const float next = __shfl_down_sync(~0u, value, 1);
    if (i % 2 == 0 && i < count) store_pair(out, tiles.tile(phase, tile) * rows + row, value, next);
  }
}

template <class Plan, Sync kSync, bool kMultiplies>
__device__ void map_phase(typename Plan::Shared& s, const Phase& phase, unsigned before, const BlockTiles& tiles,
                          const uint4* in, uint16_t* out) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, num_units = tiles.num_units(phase);
  if (num_units == 0) return;
  load_inputs<Plan, kSync>(s, phase, tiles, in);
  meet<Plan>();
  for (int j = warp; j < num_units; j += Plan::kWarps) {
    const unsigned n = before + static_cast<unsigned>(j), stage = n % Plan::kStages;
    const int local = j >> phase.log2_chunks, chunk = j & ((1 << phase.log2_chunks) - 1);
    const uint4* x = s.x + ((tiles.input_place(phase, local) << phase.log2_chunks) + chunk) * LaneInputs::kRowPlaces;
    const int parity = static_cast<int>(n / Plan::kStages & 1);
    // The stage's unit before is another warp's, perhaps still on its way: a barrier tells only two rounds apart.
    s.free[stage].wait(parity ^ 1);
    s.full[stage].wait(parity);
    if constexpr (kMultiplies) {
      sum_unit(s.stages[stage], s.free[stage], x, s.parts[j]);
    } else {
      s.free[stage].arrive();
    }
  }
  meet<Plan>();
  store_tiles<Plan>(s, phase, tiles, out);
}

// Each value by four loads one after another.
template <class Plan, Sync kSync>
__device__ void attend_phase(const Phase& phase, const uint16_t* in, uint16_t* out) {
  const int first = static_cast<int>(blockIdx.x) * Plan::kConsumers + static_cast<int>(threadIdx.x);
  for (int i = first; i < phase.num_out; i += static_cast<int>(gridDim.x) * Plan::kConsumers) {
    uint32_t at = static_cast<uint32_t>(i);
    float sum = 0;
    for (int n = 0; n < 4; ++n) {
      at %= static_cast<uint32_t>(phase.num_in);
      const uint4* const piece[1] = {reinterpret_cast<const uint4*>(in) + at / kPieceValues};
      uint4 v[1] = {__ldcg(piece[0])};
      await_values<kSync>(v, piece);
      const uint32_t word = at % 2 == 0 ? v[0].x : v[0].w;
      sum += __uint_as_float(word << 16);
      at = at * 5 + (word >> 4 & 0xFFF) + 1;
    }
    const float value = 0.5f * sum, next = __shfl_down_sync(~0u, value, 1);
    if (i % 2 == 0) store_pair(out, i, value, next);
  }
}

// This block's part of the 4,096 columns.
template <class Plan, Sync kSync>
__device__ void mix_phase(float* s_squares, const Phase& phase, const uint16_t* in, uint16_t* out) {
  const int each = (phase.num_out / kPieceValues + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x) * each;
  mix_streams<Plan, kSync>(s_squares, reinterpret_cast<const uint4*>(in), phase.num_in,
                           [&](int piece, const uint4& values) {
                             if (piece < first || piece >= first + each) return;
                             __stcg(reinterpret_cast<uint4*>(out) + piece, values);
                           });
  meet<Plan>();  // the sums of squares are free again
}

// A phase by a block's consumers; `before`: units of this launch's phases before.
template <class Plan, Sync kSync, bool kMultiplies>
__device__ void do_phase(typename Plan::Shared& s, const Job& job, int layer, int p, unsigned before) {
  const Phase& phase = job.phases[p];
  const uint16_t* in = job.input_of(layer, p);
  uint16_t* out = job.output(layer, p);
  if (phase.kind == PhaseKind::kMap) {
    map_phase<Plan, kSync, kMultiplies>(s, phase, before, BlockTiles(phase), reinterpret_cast<const uint4*>(in), out);
  } else if (phase.kind == PhaseKind::kAttend) {
    attend_phase<Plan, kSync>(phase, in, out);
  } else {
    mix_phase<Plan, kSync>(s.squares, phase, in, out);
  }
}

}  // namespace tessera::bench
