// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the two programs of persistent_layer.cu share: the phases of a decode layer at one token, and what a thread
// block does in one. A block has kWarps consumer warps and one more that copies units of packed NVFP4 weights
// (cuda_common/packed_units.h) into one ring for all of them; unit j of a block's part of a phase is warp j % kWarps's.
// A block takes neighbouring tiles of 16 rows; chunks' sums are added in ascending order, so neither the number of
// blocks nor of warps changes a bit.
//   mix     stands in for norms, mixing of streams and the router: four streams of 4,096 values (folded or repeated
//   from
//           what the phase before gave) are added and scaled by their root mean square; all blocks reduce, each writes
//           its share
//   attend  four loads, each of whose addresses depends on the one before, for each of 32,768 values
//   map     y = W x; of the experts' gate and up rows g and g + 8 of a tile become one value
// Values between phases are BF16, never 0xFFFF: that is what has not been written yet.
#include <cstdint>
#include <cuda/ptx>

#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/unit_stage.cuh"

namespace tessera::bench {

using namespace backends::cuda_common;
using backends::sm90::LaneInputs;
using backends::sm90::UnitStage;

enum class PhaseKind { kMix, kAttend, kMap };
struct Phase {
  PhaseKind kind = PhaseKind::kMix;
  bool mixes_first = false, is_gated = false;
  bool chooses = false;                       // its chosen experts are known only when the phase before has ended
  int num_in = 0, num_out = 0;                // values
  int tiles = 0, routed_tiles = 0;            // of the layer's own weights; of all chosen experts
  int log2_chunks = 0, log2_input_tiles = 0;  // columns / 512; consecutive tiles that have one input
  int first_unit = 0, expert_unit = 0;        // in the layer's own weights; in an expert's
  int log2_expert_tiles = 0;
  int out_at = 0;  // in a set of outputs
  float scale = 1;
};

constexpr int kMostPhases = 16, kSets = 3, kChosen = 6, kStreamValues = 4 * 4096, kPieceValues = 8;
constexpr int kMostUnits = 112, kInputPieces = 1024;  // of a block in a phase

struct Job {
  const char* weights;  // [layers][own units, then experts' units]
  const uint16_t* input;
  uint16_t* sets;   // [kSets][set_values]
  int* arrived;     // -1 at first, as all of the next
  int* flags;       // [blocks]
  uint64_t* begun;  // [layers][kMostPhases]: when phases of the first block had what they waited for, in ns
  int64_t layer_units, set_values;
  int own_units, expert_units, num_experts, num_phases, router_phase;
  Phase phases[kMostPhases];

  __device__ uint16_t* output(int layer, int phase) const {
    return sets + layer % kSets * set_values + phases[phase].out_at;
  }
  __device__ void note_begin(int layer, int phase) const {
    if (blockIdx.x == 0 && threadIdx.x == 0) begun[layer * kMostPhases + phase] = cuda::ptx::get_sreg_globaltimer();
  }
  __device__ const uint16_t* input_of(int layer, int phase) const {
    return phase > 0 ? output(layer, phase - 1) : layer > 0 ? output(layer - 1, num_phases - 1) : input;
  }
};

// How a phase knows that the one before has ended.
enum class Sync { kKernels, kCounter, kFlags, kWords, kNone };

template <int kWarpCount, int kStageCount>
struct Plan {
  static constexpr int kWarps = kWarpCount, kStages = kStageCount, kConsumers = kWarps * 32, kThreads = kConsumers + 32;
  struct Shared {
    UnitStage<1> stages[kStages];
    uint4 x[kInputPieces];  // arranged as LaneInputs, 512 columns after another
    float parts[kMostUnits][16];
    float squares[kStreamValues / 4 / kPieceValues / 32];
    ptx::SharedBarrier full[kStages], free[kStages], routed;
  };
};

// Between the consumers' warps alone.
template <class Plan>
__device__ void meet() {
  __barrier_sync_count(1, Plan::kConsumers);
}

__device__ inline bool is_unwritten(const uint4& v) {
  return (__vcmpeq2(v.x, ~0u) | __vcmpeq2(v.y, ~0u) | __vcmpeq2(v.z, ~0u) | __vcmpeq2(v.w, ~0u)) != 0;
}
constexpr unsigned kMostPolls = 1u << 21;  // more than a second: somebody is missing
// Until all of them have been written; those that have not are on their way again together.
template <Sync kSync, int kCount>
__device__ void await_values(uint4 (&v)[kCount], const uint4* const (&at)[kCount]) {
  if constexpr (kSync != Sync::kWords) return;
  bool is_waiting = true;
  for (unsigned polls = 0; is_waiting; ++polls) {
    if (polls == kMostPolls) __trap();
    is_waiting = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!is_unwritten(v[i])) continue;
      v[i] = __ldcg(at[i]);
      is_waiting = true;
    }
  }
}

// The part of a phase that is this block's: tiles [first, first + count) of the layer's own, then of the chosen
// experts'.
struct BlockTiles {
  int first, count, routed_first, routed_count;

  __device__ explicit BlockTiles(const Phase& phase) {
    const auto part = [](int tiles, int& begin, int& number) {
      const int each = (tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
      begin = min(static_cast<int>(blockIdx.x) * each, tiles);
      number = min(each, tiles - begin);
    };
    part(phase.tiles, first, count);
    part(phase.routed_tiles, routed_first, routed_count);
  }
  __device__ int num_units(const Phase& phase) const { return (count + routed_count) << phase.log2_chunks; }
  // Of all the phase's tiles.
  __device__ int tile(const Phase& phase, int local) const {
    return local < count ? first + local : phase.tiles + routed_first + local - count;
  }
  // Inputs that it needs, which lie in shared memory one after another: of its own tiles, then of experts'.
  __device__ int first_input(const Phase& phase) const { return first >> phase.log2_input_tiles; }
  __device__ int first_routed_input(const Phase& phase) const {
    return (phase.tiles + routed_first) >> phase.log2_input_tiles;
  }
  __device__ int num_inputs(const Phase& phase) const {
    return count == 0 ? 0 : ((first + count - 1) >> phase.log2_input_tiles) - first_input(phase) + 1;
  }
  __device__ int num_routed_inputs(const Phase& phase) const {
    return routed_count == 0 ? 0
                             : ((phase.tiles + routed_first + routed_count - 1) >> phase.log2_input_tiles) -
                                   first_routed_input(phase) + 1;
  }
  __device__ int input_place(const Phase& phase, int local) const {
    const int input = tile(phase, local) >> phase.log2_input_tiles;
    return local < count ? input - first_input(phase) : num_inputs(phase) + input - first_routed_input(phase);
  }
};

// The first of the chosen experts, which follow each other, by what the router gave.
template <Sync kSync>
__device__ int first_chosen(const Job& job, int layer) {
  const uint4* const at[1] = {reinterpret_cast<const uint4*>(job.output(layer, job.router_phase))};
  uint4 v[1] = {__ldcg(at[0])};
  await_values<kSync>(v, at);
  return static_cast<int>((v[0].x ^ v[0].y ^ v[0].z ^ v[0].w) >> 3 & 0xFFFF) % job.num_experts;
}

// Units [begin, end) of a block's part of a phase; by the copying warp, of which kCopyLanes issue copies. `before`:
// units of the phases before.
constexpr int kCopyLanes = 4;
template <class Plan>
__device__ void copy_units(typename Plan::Shared& s, const Job& job, int layer, const Phase& phase, unsigned before,
                           const BlockTiles& tiles, int begin, int end, int chosen) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane >= kCopyLanes) return;
  const char* own = job.weights + layer * job.layer_units * PackedNvfp4::kBytes;
  for (int first = begin; first < end; first += kCopyLanes) {
    // No lane is a round of the ring ahead of another: barriers tell only two rounds apart.
    __syncwarp((1u << kCopyLanes) - 1);
    const int j = first + lane;
    if (j >= end) continue;
    const unsigned n = before + static_cast<unsigned>(j), stage = n % Plan::kStages;
    const int local = j >> phase.log2_chunks, chunk = j & ((1 << phase.log2_chunks) - 1);
    int64_t unit;
    if (local < tiles.count) {
      unit = phase.first_unit + ((tiles.first + local) << phase.log2_chunks) + chunk;
    } else {
      const int tile = tiles.routed_first + local - tiles.count;
      const int expert = (chosen + (tile >> phase.log2_expert_tiles)) % job.num_experts;
      unit = job.own_units + static_cast<int64_t>(expert) * job.expert_units + phase.expert_unit +
             ((tile & ((1 << phase.log2_expert_tiles) - 1)) << phase.log2_chunks) + chunk;
    }
    s.free[stage].wait(static_cast<int>(n / Plan::kStages & 1) ^ 1);
    s.full[stage].arrive_and_expect(PackedNvfp4::kBytes);
    ptx::copy_bulk(s.stages[stage].units[0], own + unit * PackedNvfp4::kBytes, PackedNvfp4::kBytes, s.full[stage]);
  }
}

// write(piece, values): eight columns of the 4,096. By all consumers, who may be fewer than the pieces.
template <class Plan, Sync kSync, class Write>
__device__ void mix_streams(float* s_squares, const uint4* in, int num_in, const Write& write) {
  constexpr int kPieces = kStreamValues / 4 / kPieceValues, kTurns = kPieces / Plan::kConsumers, kAll = 4 * kPieces;
  const int num_pieces = num_in / kPieceValues, thread = static_cast<int>(threadIdx.x);
  float sums[kTurns][kPieceValues];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int column = turn * Plan::kConsumers + thread;
    const uint4* at[8];
    uint4 loaded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int piece = i % 4 * kPieces + column + i / 4 * kAll;
      at[i] = in + (i < 4 ? piece % num_pieces : piece);
      if (i < 4 || piece < num_pieces)
        loaded[i] = __ldcg(at[i]);
      else
        loaded[i] = {0, 0, 0, 0};
    }
    float square = 0;
#pragma unroll
    for (int k = 0; k < kPieceValues; ++k) sums[turn][k] = 0;
    await_values<kSync>(loaded, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t words[2][4] = {{loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w},
                                    {loaded[i + 4].x, loaded[i + 4].y, loaded[i + 4].z, loaded[i + 4].w}};
#pragma unroll
      for (int k = 0; k < kPieceValues; ++k) {
        const auto value = [&](int half) {
          return __uint_as_float(k % 2 == 0 ? words[half][k / 2] << 16 : words[half][k / 2] & 0xFFFF0000);
        };
        const float v = value(0) + value(1);
        sums[turn][k] += v;
        square += v * v;
      }
    }
    const float half = add_lanes(square);
    square = half + __shfl_xor_sync(~0u, half, kLanes);
    if (thread % kWarp == 0) s_squares[column / kWarp] = square;
  }
  meet<Plan>();
  float total = 0;
  for (int i = 0; i < kPieces / kWarp; ++i) total += s_squares[i];
  const float factor = 0.5f / sqrtf(total / kStreamValues + 1e-6f);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const float(&v)[kPieceValues] = sums[turn];
    const auto pair = [&](int k) { return ptx::round_to_bf16x2(v[k] * factor, v[k + 1] * factor); };
    write(turn * Plan::kConsumers + thread, uint4{pair(0), pair(2), pair(4), pair(6)});
  }
}

}  // namespace tessera::bench
