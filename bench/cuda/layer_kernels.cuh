// SPDX-License-Identifier: Apache-2.0
#pragma once
// A layer as kernels behind one another, and as one kernel whose blocks are all in place at once and wait for each
// other between phases.
#include "bench/cuda/layer_work.cuh"
#include "device/cuda/stream_queue.h"
#include "ops/random_fill/random_fill.h"

namespace tessera::bench {

template <class Plan>
__device__ typename Plan::Shared& begin_block() {
  auto& s = *swizzled_shared<typename Plan::Shared>();
  for (int i = static_cast<int>(threadIdx.x); i < Plan::kStages; i += Plan::kThreads) {
    s.full[i].init(1);
    s.free[i].init(kWarp);
  }
  if (threadIdx.x == 0) s.routed.init(1);
  __syncthreads();
  return s;
}

// (a) A phase. Weights that do not depend on what has just been chosen are copied before the wait; the chosen experts'
// second map may, since the router had ended before this kernel's predecessor let it begin.
template <class Plan>
__global__ void __maxnreg__(80) phase_kernel(const __grid_constant__ Job job, int layer, int p) {
  auto& s = begin_block<Plan>();
  const Phase& phase = job.phases[p];
  if (threadIdx.x < Plan::kConsumers) {
    wait_for_previous();
    job.note_begin(layer, p);
    do_phase<Plan, Sync::kKernels, true>(s, job, layer, p, 0);
    return;
  }
  const BlockTiles tiles(phase);
  const int own = tiles.count << phase.log2_chunks;
  copy_units<Plan>(s, job, layer, phase, 0, tiles, 0, own, 0);
  if (phase.chooses) wait_for_previous();
  const int chosen = phase.routed_tiles > 0 ? first_chosen<Sync::kKernels>(job, layer) : 0;
  copy_units<Plan>(s, job, layer, phase, 0, tiles, own, tiles.num_units(phase), chosen);
  if (!phase.chooses) wait_for_previous();
}

// The same without weights. Registers are so few that a kernel with weights finds a place beside it.
template <class Plan>
__global__ void __maxnreg__(40) light_kernel(const __grid_constant__ Job job, int layer, int p) {
  __shared__ float s_squares[kStreamValues / 4 / kPieceValues / 32];
  wait_for_previous();
  job.note_begin(layer, p);
  const Phase& phase = job.phases[p];
  if (phase.kind == PhaseKind::kAttend) {
    attend_phase<Plan, Sync::kKernels>(phase, job.input_of(layer, p), job.output(layer, p));
  } else {
    mix_phase<Plan, Sync::kKernels>(s_squares, phase, job.input_of(layer, p), job.output(layer, p));
  }
}

__device__ inline void await_number(int* at, int number) {
  for (unsigned polls = 0; __nv_atomic_load_n(at, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_DEVICE) < number; ++polls) {
    if (polls == kMostPolls) __trap();
  }
}

// All blocks' consumers; `epoch` counts from 1. What they wrote before is there for all behind it.
template <class Plan, Sync kSync>
__device__ void pass_barrier(const Job& job, int epoch) {
  const int blocks = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
  meet<Plan>();
  if constexpr (kSync == Sync::kCounter) {
    if (thread == 0) {
      __nv_atomic_fetch_add(job.arrived, 1, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
      await_number(job.arrived, blocks * epoch - 1);
    }
  } else if (thread < kWarp) {
    if (thread == 0) {
      __nv_atomic_store_n(job.flags + blockIdx.x, epoch, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
    }
    for (int i = thread; i < blocks; i += kWarp) await_number(job.flags + i, epoch);
    __syncwarp();
  }
  meet<Plan>();
}

// What layers from the next on will write is unwritten again: of the layer before last, whose outputs nobody reads any
// more behind this layer's attention.
template <class Plan>
__device__ void clear_set(const Job& job, int layer) {
  uint4* set = reinterpret_cast<uint4*>(job.sets + (layer + 1) % kSets * job.set_values);
  const int count = static_cast<int>(job.set_values / kPieceValues);
  for (int i = static_cast<int>(blockIdx.x) * Plan::kConsumers + static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * Plan::kConsumers) {
    __stcg(set + i, uint4{~0u, ~0u, ~0u, ~0u});
  }
  __threadfence();
}

// (b), (c) Layers [first_layer, last_layer).
template <class Plan, Sync kSync, bool kMultiplies>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    layer_kernel(const __grid_constant__ Job job, int first_layer, int last_layer) {
  auto& s = begin_block<Plan>();
  unsigned before = 0;
  if (threadIdx.x >= Plan::kConsumers) {
    for (int layer = first_layer, parity = 0; layer < last_layer; ++layer, parity ^= 1) {
      int chosen = 0;
      for (int p = 0; p < job.num_phases; ++p) {
        const Phase& phase = job.phases[p];
        if (phase.kind != PhaseKind::kMap) continue;
        const BlockTiles tiles(phase);
        const int own = tiles.count << phase.log2_chunks, all = tiles.num_units(phase);
        copy_units<Plan>(s, job, layer, phase, before, tiles, 0, own, chosen);
        if (phase.chooses) {
          if (layer == first_layer) wait_for_previous();
          if constexpr (kSync == Sync::kCounter || kSync == Sync::kFlags) s.routed.wait(parity);
          chosen = first_chosen<kSync>(job, layer);
        }
        copy_units<Plan>(s, job, layer, phase, before, tiles, own, all, chosen);
        before += static_cast<unsigned>(all);
      }
    }
    return;
  }
  wait_for_previous();
  constexpr bool kHasBarrier = kSync == Sync::kCounter || kSync == Sync::kFlags;
  int epoch = first_layer * job.num_phases - first_layer;
  for (int layer = first_layer; layer < last_layer; ++layer) {
    for (int p = 0; p < job.num_phases; ++p) {
      const Phase& phase = job.phases[p];
      if (kHasBarrier && (p > 0 || layer > first_layer)) pass_barrier<Plan, kSync>(job, ++epoch);
      if (kHasBarrier && phase.chooses && threadIdx.x == 0) s.routed.arrive();
      job.note_begin(layer, p);
      do_phase<Plan, kSync, kMultiplies>(s, job, layer, p, before);
      if (kSync == Sync::kWords && p == job.router_phase) clear_set<Plan>(job, layer);
      if (phase.kind == PhaseKind::kMap) before += static_cast<unsigned>(BlockTiles(phase).num_units(phase));
    }
  }
}

// The barrier alone.
template <class Plan, Sync kSync>
__global__ void __launch_bounds__(Plan::kThreads, 1) barrier_kernel(const __grid_constant__ Job job, int count) {
  if (threadIdx.x >= Plan::kConsumers) return;
  for (int epoch = 1; epoch <= count; ++epoch) pass_barrier<Plan, kSync>(job, epoch);
}

// Sums of a map by the kernels' other loop, which has no ring: a block a tile. Counts rows that differ.
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    count_differences(const __grid_constant__ Job job, int layer, int p, unsigned* differences) {
  __shared__ float s_parts[kMaxWarps][kTileSums], s_sums[kTileSums];
  const Phase& phase = job.phases[p];
  const int tile = static_cast<int>(blockIdx.x), width = kChunk << phase.log2_chunks;
  const char* units = job.weights + (layer * job.layer_units + phase.first_unit) * PackedNvfp4::kBytes;
  const PackedRows<ops::WeightFormat::kNvfp4> rows(units, nullptr, tile * kTileRows, width);
  const Operands<1> x = {{job.input_of(layer, p) + (tile >> phase.log2_input_tiles) * width}};
  sum_tile(rows, x, s_parts, s_sums);
  for (int at = static_cast<int>(threadIdx.x); at < kTileSums; at += static_cast<int>(blockDim.x)) {
    if (token_of_sum(at) != 0) continue;
    const float y = s_sums[at] * (UnitStage<1>::Share::kFactor * phase.scale);
    const auto bits = static_cast<uint16_t>(ptx::round_to_bf16x2(y, 0) & 0xFFFF);
    if (job.output(layer, p)[tile * kTileRows + row_of_sum(at)] != bits) atomicAdd(differences, 1u);
  }
}

// Random codes and scales, a thread eight bytes.
__global__ void fill_units(char* units, int64_t count, uint64_t seed) {
  using Kind = ops::RandomFill::Kind;
  constexpr int64_t kWords = PackedNvfp4::kBytes / 8, kScaleWords = PackedNvfp4::kScaleBytes / 8;
  for (int64_t i = item_index(); i < count * kWords; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Kind kind = i % kWords < kScaleWords ? Kind::kScales : Kind::kCodes;
    reinterpret_cast<uint64_t*>(units)[i] = ops::random_bytes(kind, seed, i);
  }
}
__global__ void fill_input(uint16_t* values, uint64_t seed) {
  const auto i = static_cast<int>(item_index());
  values[i] = static_cast<uint16_t>(ptx::round_to_bf16x2(ops::random_normal(seed, i), 0) & 0xFFFF);
}

// All blocks at once, or refused.
template <class... Parameters, class... Arguments>
void launch_cooperative(const char* name, const device::cuda::StreamQueue& queue, void (*kernel)(Parameters...),
                        unsigned blocks, unsigned threads, size_t shared_bytes, Arguments... arguments) {
  TESSERA_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = queue.handle(), config.attrs = &attribute, config.numAttrs = 1;
  device::cuda::check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name, __FILE__, __LINE__);
}

}  // namespace tessera::bench
