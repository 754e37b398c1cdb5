// SPDX-License-Identifier: Apache-2.0
// moe_experts: tokens are grouped by expert on the device, then half a warp computes a weight row for a tile of an
// expert's tokens; or, on tensor cores, a thread block 16 weight rows.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/expert_tiles.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/packed_ring.cuh"
#include "backends/cuda_common/weight_ring.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using namespace expert_tiles;

constexpr int kRowsPerBlock = 8;
constexpr int kGroupThreads = 256;

int64_t max_tiles(const ops::MoeExperts::Desc& desc, int64_t num_slots) {
  return std::min(num_slots, num_slots / kTokenTile + desc.num_local);
}

int64_t layout_scratch(const ops::MoeExperts::Desc& desc, int64_t num_tokens, char* base, Scratch& scratch) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base == nullptr ? nullptr : base + used;
    used += round_up<int64_t>(bytes, 256);
    return at;
  };
  const int64_t num_slots = num_tokens * desc.top_k, num_x = needs_input_rows(desc.input) ? num_tokens : 0;
  scratch.x = reinterpret_cast<float*>(take(num_x * desc.hidden * 4));
  scratch.x_factors = reinterpret_cast<float*>(take(num_x * 4));
  scratch.h = reinterpret_cast<float*>(take(num_slots * desc.inner * 4));
  scratch.h_factors = reinterpret_cast<float*>(take(num_slots * 4));
  scratch.slots = reinterpret_cast<int32_t*>(take(num_slots * 4));
  scratch.begins = reinterpret_cast<int32_t*>(take((desc.num_local + 1) * 4));
  scratch.tile_begins = reinterpret_cast<int32_t*>(take((desc.num_local + 1) * 4));
  scratch.tiles = reinterpret_cast<Tile*>(take(max_tiles(desc, num_slots) * static_cast<int64_t>(sizeof(Tile))));
  scratch.work = reinterpret_cast<Work*>(take(max_tiles(desc, num_slots) * static_cast<int64_t>(sizeof(Work))));
  return used;
}

// Slots [begin, min(begin + kTokenTile, end)) of Scratch::slots, of one expert.
__device__ void describe(const Job& job, const Matrices& matrices, int32_t begin, int32_t end, Work& work) {
  work.count = min(end - begin, kTokenTile);
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) work.slots[i] = job.scratch.slots[begin + min(i, work.count - 1)];
  fill_matrices(matrices, work);
}

// In the first thread block a thread counts, then lists, the slots of an expert: whole numbers in a fixed order. The
// others have a slot each.
__global__ void __launch_bounds__(kGroupThreads) group_by_expert(Job job) {
  __shared__ int2 s_end;  // slots and tiles of the experts so far
  // Weights are there before the kernel before this one ends: where they lie is loaded meanwhile.
  Matrices matrices;
  const auto load_matrices = [&](int64_t e) {
    if (job.wants_work && e < job.num_local) matrices = {{job.w1[e], job.w3[e], job.w2[e]}};
  };
  if (blockIdx.x == 0) load_matrices(threadIdx.x);
  wait_for_previous();
  if (blockIdx.x > 0) return zero_if_foreign(job, blockIdx.x - 1);
  const Scratch& s = job.scratch;
  if (threadIdx.x == 0) s_end = {0, 0}, s.begins[0] = 0, s.tile_begins[0] = 0;
  __syncthreads();
  for (int64_t first_expert = 0; first_expert < job.num_local; first_expert += kGroupThreads) {
    const int64_t e = first_expert + threadIdx.x;
    const bool is_expert = e < job.num_local;
    if (first_expert > 0) load_matrices(e);
    int32_t count = 0;
    for (int64_t slot = 0; is_expert && slot < job.num_slots; ++slot) {
      count += job.experts[slot] == job.first_expert + e;
    }
    const int32_t num_tiles = ceil_div<int32_t>(count, kTokenTile);
    const int2 end = s_end;
    int32_t at = end.x + sum_before(count).before, tile = end.y + sum_before(num_tiles).before;
    const int2 next = {at + count, tile + num_tiles};
    if (is_expert) s.begins[e + 1] = at + count, s.tile_begins[e + 1] = tile + num_tiles;
    for (int32_t left = count; left > 0; left -= kTokenTile, ++tile) {
      s.tiles[tile] = {static_cast<int32_t>(e), at + count - left, min(left, kTokenTile)};
    }
    const int32_t first = at;
    for (int64_t slot = 0; count > 0 && slot < job.num_slots; ++slot) {
      if (job.experts[slot] == job.first_expert + e) s.slots[at++] = static_cast<int32_t>(slot);
    }
    if (job.wants_work) {
      tile -= num_tiles;
      for (int32_t begin = first; begin < at; begin += kTokenTile) describe(job, matrices, begin, at, s.work[tile++]);
    }
    __syncthreads();  // everybody has read s_end
    if (threadIdx.x == kGroupThreads - 1) s_end = next;
    __syncthreads();
  }
}

template <ops::WeightFormat kFormat>
__device__ WeightRow<kFormat> row_of(const ops::WeightView& view, int64_t cols, int64_t row) {
  return WeightRow<kFormat>(view.data, view.block_scales, cols, row);
}

// Grid: tiles by groups of inner rows.
template <ops::WeightFormat kFormat>
__global__ void gate_and_up(Job job) {
  wait_for_previous();
  const Scratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.tile_begins[job.num_local]) return;
  const Tile tile = s.tiles[blockIdx.x];
  const int64_t at = blockIdx.y * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t row = at < job.inner ? at : job.inner - 1;
  int64_t offsets[kTokenTile];
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) {
    offsets[i] = i < tile.count ? s.slots[tile.first + i] / job.top_k * job.hidden : 0;
  }
  const ops::WeightView &w1 = job.w1[tile.expert], &w3 = job.w3[tile.expert];
  float gates[kTokenTile], ups[kTokenTile];
  dot_tile(row_of<kFormat>(w1, job.hidden, row), job.x, offsets, tile.count, job.hidden, gates);
  dot_tile(row_of<kFormat>(w3, job.hidden, row), job.x, offsets, tile.count, job.hidden, ups);
  if (at >= job.inner || threadIdx.x % kLanes != 0) return;
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) {
    if (i >= tile.count) break;
    const int64_t slot = s.slots[tile.first + i];
    const float factor = job.x_factors == nullptr ? 1.0f : job.x_factors[slot / job.top_k];
    const float gate = gates[i] * (factor * w1.tensor_scale), up = ups[i] * (factor * w3.tensor_scale);
    const float h = swiglu_value(round_to(job.is_bf16, gate), round_to(job.is_bf16, up), job.limit);
    s.h[slot * job.inner + row] = round_to(job.is_bf16, h * job.routing[slot]);
  }
}

// Grid: tiles by groups of hidden rows.
template <ops::WeightFormat kFormat>
__global__ void down(Job job) {
  wait_for_previous();
  const Scratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.tile_begins[job.num_local]) return;
  const Tile tile = s.tiles[blockIdx.x];
  const int64_t at = blockIdx.y * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t row = at < job.hidden ? at : job.hidden - 1;
  int64_t offsets[kTokenTile];
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) offsets[i] = i < tile.count ? s.slots[tile.first + i] * job.inner : 0;
  const ops::WeightView& w2 = job.w2[tile.expert];
  float sums[kTokenTile];
  dot_tile(row_of<kFormat>(w2, job.inner, row), Values{s.h, false}, offsets, tile.count, job.inner, sums);
  if (at >= job.hidden || threadIdx.x % kLanes != 0) return;
#pragma unroll
  for (int i = 0; i < kTokenTile; ++i) {
    if (i >= tile.count) break;
    const int64_t slot = s.slots[tile.first + i];
    const float factor = job.h_factors == nullptr ? 1.0f : job.h_factors[slot];
    job.out.store(slot * job.hidden + row, sums[i] * (factor * w2.tensor_scale));
  }
}

// The same two on tensor cores, by tiles (expert_tiles.cuh) that are dealt out as weight_stream.cuh says.
// Of down's blocks those that find room begin before gate and up have ended, but not before all of gate and up's have
// waited (launch.cuh): so they may look up which weights they will want, and copy them, before they wait themselves.
template <class Ring, class Tiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2) experts_mma(Job job, StreamShape shape, FastDivisor row_tiles) {
  OwnList& s_list = *dynamic_shared<OwnList>();  // then sums, then the rings
  if constexpr (Tiles::kIsFirst) {
    if (job.lists_itself) prefetch_matrices(job);
    wait_for_previous();
    if (job.lists_itself) zero_foreign_slots(job);
  }
  const WorkList list = work_of<kTokenTile>(job, s_list);
  const Tiles tiles(job, list, row_tiles);
  const int num_tiles = tiles.count();
  float* s_sums = reinterpret_cast<float*>(&s_list + 1);
  Ring ring(shape, num_tiles, tiles, reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(Tiles::kPasses)));
  if constexpr (!Tiles::kIsFirst) wait_for_previous();
  stream_tiles(shape, num_tiles, tiles, ring, s_sums);
}

}  // namespace

unsigned expert_tiles::begin(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, bool wants_work,
                             device::Queue& queue, Job& job) {
  const int64_t num_slots = args.num_tokens * desc.top_k;
  layout_scratch(desc, args.num_tokens, static_cast<char*>(args.workspace), job.scratch);
  job.experts = args.experts, job.routing = args.routing;
  job.w1 = args.w1, job.w3 = args.w3, job.w2 = args.w2;
  job.x = values_of(args.x);
  job.out = values_of(args.out);
  job.hidden = desc.hidden, job.inner = desc.inner;
  job.first_expert = desc.first_expert, job.num_local = desc.num_local;
  job.top_k = desc.top_k, job.num_slots = num_slots;
  job.limit = desc.swiglu_limit;
  job.is_bf16 = desc.activation == DType::kBF16, job.wants_work = wants_work;
  job.token_of = FastDivisor(static_cast<uint32_t>(desc.top_k));
  if (needs_input_rows(desc.input)) {
    const TensorView rows{job.scratch.x, wants_work ? DType::kBF16 : DType::kF32, args.x.shape};
    prepare_input_rows(desc.input, args.x, args.num_tokens, desc.hidden, nullptr, rows, job.scratch.x_factors, queue);
    job.x = values_of(rows);
    if (has_row_factors(desc.input)) job.x_factors = job.scratch.x_factors, job.h_factors = job.scratch.h_factors;
  }
  job.lists_itself = wants_work && num_slots <= kFewExpertSlots;
  if (!job.lists_itself) {
    const dim3 grid(static_cast<unsigned>(1 + num_slots));
    launch("group_by_expert", queue, group_by_expert, grid, kGroupThreads, 0, job);
  }
  return static_cast<unsigned>(max_tiles(desc, num_slots));
}

void expert_tiles::round_h(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, DType dtype,
                           const Job& job, device::Queue& queue) {
  if (!needs_input_rows(desc.input)) return;
  const ExpertRows slots{args.experts, args.routing, desc.first_expert, desc.num_local, desc.swiglu_limit};
  const TensorView h{job.scratch.h, dtype, {job.num_slots, desc.inner}};
  prepare_input_rows(desc.input, h, job.num_slots, desc.inner, &slots, h, job.scratch.h_factors, queue);
}

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  Scratch scratch{};
  return layout_scratch(desc, max_tokens, nullptr, scratch);
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  Job job{};
  const unsigned tiles = begin(desc, args, false, queue, job);
  const dim3 gate_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.inner, kRowsPerBlock)));
  const dim3 down_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.hidden, kRowsPerBlock)));
  with_format(desc.format, [&](auto format) {
    launch("gate_and_up", queue, gate_and_up<format.value>, gate_grid, kRowsPerBlock * kLanes, 0, job);
    round_h(desc, args, DType::kF32, job, queue);
    launch("down", queue, down<format.value>, down_grid, kRowsPerBlock * kLanes, 0, job);
  });
}

bool moe_experts_mma_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.activation != DType::kBF16) {
    why_not = "inputs are not BF16";
  } else if (desc.format != ops::WeightFormat::kFp8Block && desc.format != ops::WeightFormat::kBf16) {
    why_not = "weights are neither FP8 nor BF16";
  } else if (!can_stream(desc.hidden) || !can_stream(desc.inner)) {
    why_not = "widths are not multiples of 128";
  } else {
    return true;
  }
  return false;
}

bool moe_experts_packed_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.format == ops::WeightFormat::kF32) {
    why_not = "weights are FP32";
    return false;
  }
  ops::MoeExperts::Desc as_fp8 = desc;  // the rest is the same
  as_fp8.format = ops::WeightFormat::kFp8Block;
  return moe_experts_mma_supports(as_fp8, why_not);
}

namespace {

// Ring<stages, Tiles> of kStages stages, or of two where shared memory is short (99 KB of compute capability 8.6).
template <class Share, template <int, class> class Ring, int kStages>
void run_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  Job job{};
  const int64_t tiles = begin(desc, args, true, queue, job);
  const auto start = [&](const char* name, auto all, int64_t width, int64_t rows) {
    using Tiles = typename decltype(all)::type;
    const FastDivisor row_tiles(static_cast<uint32_t>(ceil_div<int64_t>(rows, kTileRows)));
    const int64_t num_tiles = tiles * row_tiles.divisor();
    StreamShape shape = stream_shape(width, num_tiles, Tiles::kPasses);
    const auto bytes = [&](int stages) {
      // A stage's, whatever their number.
      return sizeof(OwnList) + shape.shared_bytes(stages, Ring<2, Tiles>::kBytes, Tiles::kPasses);
    };
    const auto start_with = [&](auto stages) {
      launch(name, queue, experts_mma<Ring<stages.value, Tiles>, Tiles>, dim3(shape.blocks(num_tiles)), shape.threads(),
             bytes(stages.value), job, shape, row_tiles);
    };
    const size_t most = most_shared_bytes();
    if (bytes(kStages) <= most) return start_with(std::integral_constant<int, kStages>());
    // Fewer stages, then smaller blocks.
    if (bytes(2) > most) shape.block_tiles = 1;
    while (bytes(2) > most && shape.tile_warps > 1) shape.tile_warps /= 2;
    start_with(std::integral_constant<int, 2>());
  };
  start("gate_and_up_mma", std::type_identity<GateAndUpTiles<Share>>(), desc.hidden, desc.inner);
  round_h(desc, args, DType::kBF16, job, queue);
  start("down_mma", std::type_identity<DownTiles<Share>>(), desc.inner, desc.hidden);
}

template <ops::WeightFormat kFormat>
struct Checkpoint {
  template <int kStages, class Tiles>
  using Ring = WeightRing<kFormat, kStages, Tiles>;
};
template <ops::WeightFormat kFormat>
struct Packed {
  template <int kStages, class Tiles>
  using Ring = PackedRing<kFormat, kStages, Tiles>;
};

}  // namespace

void moe_experts_mma(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  const auto run = [&](auto format) {
    constexpr ops::WeightFormat kFormat = format.value;
    run_experts<WeightShare<kFormat>, Checkpoint<kFormat>::template Ring, kFewStages<kFormat>>(desc, args, queue);
  };
  if (desc.format == ops::WeightFormat::kFp8Block) {
    run(std::integral_constant<ops::WeightFormat, ops::WeightFormat::kFp8Block>());
  } else {
    run(std::integral_constant<ops::WeightFormat, ops::WeightFormat::kBf16>());
  }
}

void moe_experts_packed(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  const auto run = [&](auto format) {
    constexpr ops::WeightFormat kFormat = format.value;
    run_experts<PackedShare<kFormat>, Packed<kFormat>::template Ring, kPackedStages>(desc, args, queue);
  };
  switch (desc.format) {
    case ops::WeightFormat::kNvfp4:
      return run(FormatConstant<ops::WeightFormat::kNvfp4>());
    case ops::WeightFormat::kFp8Block:
      return run(FormatConstant<ops::WeightFormat::kFp8Block>());
    case ops::WeightFormat::kBf16:
      return run(FormatConstant<ops::WeightFormat::kBf16>());
    case ops::WeightFormat::kF32:
      break;  // declined
  }
}

}  // namespace tessera::backends::cuda
