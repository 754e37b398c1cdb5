// SPDX-License-Identifier: Apache-2.0
// moe_experts: tokens are grouped by expert on the device, then half a warp computes a weight row for a tile of an
// expert's tokens; or, on tensor cores, a thread block 16 weight rows.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kRowsPerBlock = 8;
constexpr int kGroupThreads = 256;

// Up to kTokenTile slots of one expert.
struct Tile {
  int32_t expert, first, count;  // first: into Scratch::slots
};

// The workspace. A slot is (token, rank of the expert in its list); slots are grouped by expert, tokens ascending.
struct Scratch {
  float *x, *x_factors;     // [tokens, hidden], [tokens]: inputs as the multiply sees them, where that differs
  float *h, *h_factors;     // [slots, inner], [slots]
  int32_t *slots, *begins;  // [slots]; [num_local + 1] each local expert's range in `slots`
  int32_t* tile_begins;     // [num_local + 1] each local expert's range in `tiles`
  Tile* tiles;              // [max_tiles]
};

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
  return used;
}

struct Job {
  Scratch scratch;
  const int32_t* experts;  // [slots] ascending in a token
  const float* routing;    // [slots]
  const ops::WeightView *w1, *w3, *w2;
  Values x;                            // [tokens, hidden]
  const float *x_factors, *h_factors;  // null: 1
  Values out;                          // [slots, hidden]
  int64_t hidden, inner, first_expert, num_local, top_k, num_slots;
  float limit;
  bool is_bf16;
};

// Sums of `count` before each thread's, over the block; each warp first, then the warps.
__device__ int2 sums_before(int2 count) {
  __shared__ int2 s_warps[kGroupThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = count;
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) sum.x += x, sum.y += y;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum.x += s_warps[w].x, sum.y += s_warps[w].y;
  return {sum.x - count.x, sum.y - count.y};
}

// One thread block; a thread counts, then lists, the slots of an expert. Whole numbers in a fixed order.
__global__ void __launch_bounds__(kGroupThreads) group_by_expert(Job job) {
  __shared__ int2 s_end;  // slots and tiles of the experts so far
  wait_for_previous();
  const Scratch& s = job.scratch;
  if (threadIdx.x == 0) s_end = {0, 0}, s.begins[0] = 0, s.tile_begins[0] = 0;
  __syncthreads();
  for (int64_t first_expert = 0; first_expert < job.num_local; first_expert += kGroupThreads) {
    const int64_t e = first_expert + threadIdx.x;
    const bool is_expert = e < job.num_local;
    int32_t count = 0;
    for (int64_t slot = 0; is_expert && slot < job.num_slots; ++slot) {
      count += job.experts[slot] == job.first_expert + e;
    }
    const int32_t num_tiles = ceil_div<int32_t>(count, kTokenTile);
    const int2 before = sums_before({count, num_tiles}), end = s_end;
    int32_t at = end.x + before.x, tile = end.y + before.y;
    if (is_expert) s.begins[e + 1] = at + count, s.tile_begins[e + 1] = tile + num_tiles;
    for (int32_t left = count; left > 0; left -= kTokenTile, ++tile) {
      s.tiles[tile] = {static_cast<int32_t>(e), at + count - left, min(left, kTokenTile)};
    }
    for (int64_t slot = 0; count > 0 && slot < job.num_slots; ++slot) {
      if (job.experts[slot] == job.first_expert + e) s.slots[at++] = static_cast<int32_t>(slot);
    }
    __syncthreads();  // everybody has read s_end
    if (threadIdx.x == kGroupThreads - 1) s_end = {end.x + before.x + count, end.y + before.y + num_tiles};
    __syncthreads();
  }
}

// Slots of experts of other ranks are zero.
__global__ void zero_foreign_slots(Job job) {
  wait_for_previous();
  const int64_t slot = blockIdx.x, expert = job.experts[slot] - job.first_expert;
  if (expert >= 0 && expert < job.num_local) return;
  for (int64_t i = threadIdx.x; i < job.hidden; i += blockDim.x) job.out.store(slot * job.hidden + i, 0);
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

// The same two on tensor cores: grid of tiles by groups of 16 rows. h is BF16, in the memory of Scratch::h.
static_assert(kTokenTile == kTileTokens);

__device__ Operands<1> operands_of(const Values& x, int64_t row_of_x, bool is_there, int64_t width, int64_t num_rows) {
  Operands<1> operands;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int r = 0; r < 2; ++r) {
    operands.rows[r] = min(static_cast<int64_t>(blockIdx.y) * kTileRows + lane / 4 + 8 * r, num_rows - 1);
  }
  operands.x[0] = is_there ? static_cast<const uint16_t*>(x.data) + row_of_x * width : nullptr;
  return operands;
}

template <ops::WeightFormat kFormat>
__global__ void __launch_bounds__(kMaxWarps* kWarp) gate_and_up_mma(Job job) {
  wait_for_previous();
  __shared__ float s_parts[kMaxWarps][kTileSums], s_gates[kTileSums], s_ups[kTileSums];
  const Scratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.tile_begins[job.num_local]) return;
  const Tile tile = s.tiles[blockIdx.x];
  const int column = static_cast<int>(threadIdx.x) % kWarp / 4;
  const bool is_there = column < tile.count;
  const int64_t token = is_there ? s.slots[tile.first + column] / job.top_k : 0;
  const Operands<1> operands = operands_of(job.x, token, is_there, job.hidden, job.inner);
  const ops::WeightView &w1 = job.w1[tile.expert], &w3 = job.w3[tile.expert];
  sum_tile<kFormat>({w1.data, w1.block_scales, job.hidden}, operands, s_parts, s_gates);
  sum_tile<kFormat>({w3.data, w3.block_scales, job.hidden}, operands, s_parts, s_ups);
  for (int at = static_cast<int>(threadIdx.x); at < kTileSums; at += static_cast<int>(blockDim.x)) {
    const int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + row_of_sum(at);
    if (row >= job.inner || token_of_sum(at) >= tile.count) continue;
    const int64_t slot = s.slots[tile.first + token_of_sum(at)];
    const float gate = s_gates[at] * WeightShare<kFormat>::kFactor * w1.tensor_scale;
    const float up = s_ups[at] * WeightShare<kFormat>::kFactor * w3.tensor_scale;
    const float h = swiglu_value(round_to(true, gate), round_to(true, up), job.limit);
    Values{s.h, true}.store(slot * job.inner + row, h * job.routing[slot]);
  }
}

template <ops::WeightFormat kFormat>
__global__ void __launch_bounds__(kMaxWarps* kWarp) down_mma(Job job) {
  wait_for_previous();
  __shared__ float s_parts[kMaxWarps][kTileSums], s_sums[kTileSums];
  const Scratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.tile_begins[job.num_local]) return;
  const Tile tile = s.tiles[blockIdx.x];
  const int column = static_cast<int>(threadIdx.x) % kWarp / 4;
  const bool is_there = column < tile.count;
  const int64_t row_of_h = is_there ? s.slots[tile.first + column] : 0;
  const Operands<1> operands = operands_of(Values{s.h, true}, row_of_h, is_there, job.inner, job.hidden);
  const ops::WeightView& w2 = job.w2[tile.expert];
  sum_tile<kFormat>({w2.data, w2.block_scales, job.inner}, operands, s_parts, s_sums);
  for (int at = static_cast<int>(threadIdx.x); at < kTileSums; at += static_cast<int>(blockDim.x)) {
    const int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + row_of_sum(at);
    if (row >= job.hidden || token_of_sum(at) >= tile.count) continue;
    const int64_t slot = s.slots[tile.first + token_of_sum(at)];
    job.out.store(slot * job.hidden + row, s_sums[at] * WeightShare<kFormat>::kFactor * w2.tensor_scale);
  }
}

// Fills `job`, groups the slots and zeroes those of other ranks; the number of tiles to launch for.
unsigned begin(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue, Job& job) {
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
  job.is_bf16 = desc.activation == DType::kBF16;
  launch("group_by_expert", queue, group_by_expert, dim3(1), kGroupThreads, 0, job);
  launch("zero_foreign_slots", queue, zero_foreign_slots, grid_for(num_slots, 1), 128, 0, job);
  return static_cast<unsigned>(max_tiles(desc, num_slots));
}

}  // namespace

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  Scratch scratch{};
  return layout_scratch(desc, max_tokens, nullptr, scratch);
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t num_slots = args.num_tokens * desc.top_k;
  const bool is_replaced = needs_input_rows(desc.input);
  Job job{};
  const unsigned tiles = begin(desc, args, queue, job);
  if (is_replaced) job.x = {job.scratch.x, false};
  job.x_factors = is_replaced ? job.scratch.x_factors : nullptr;
  job.h_factors = is_replaced ? job.scratch.h_factors : nullptr;

  if (is_replaced) {
    prepare_input_rows(desc.input, args.x, args.num_tokens, desc.hidden, nullptr, job.scratch.x, job.scratch.x_factors,
                       queue);
  }
  const dim3 gate_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.inner, kRowsPerBlock)));
  const dim3 down_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.hidden, kRowsPerBlock)));
  with_format(desc.format, [&](auto format) {
    launch("gate_and_up", queue, gate_and_up<format.value>, gate_grid, kRowsPerBlock * kLanes, 0, job);
    if (is_replaced) {
      const ExpertRows slots{args.experts, args.routing, desc.first_expert, desc.num_local, desc.swiglu_limit};
      prepare_input_rows(desc.input, {job.scratch.h, DType::kF32, {num_slots, desc.inner}}, num_slots, desc.inner,
                         &slots, job.scratch.h, job.scratch.h_factors, queue);
    }
    launch("down", queue, down<format.value>, down_grid, kRowsPerBlock * kLanes, 0, job);
  });
}

bool moe_experts_mma_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.input != ops::InputMode::kA16 || desc.activation != DType::kBF16) {
    why_not = "inputs are not plain BF16 (a16)";
  } else if (desc.format == ops::WeightFormat::kF32) {
    why_not = "weights are FP32";
  } else if (desc.hidden % 16 != 0 || desc.inner % 16 != 0) {
    why_not = "widths are not multiples of 16";
  } else {
    return true;
  }
  return false;
}

void moe_experts_mma(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  Job job{};
  const unsigned tiles = begin(desc, args, queue, job);
  const dim3 gate_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.inner, kTileRows)));
  const dim3 down_grid(tiles, static_cast<unsigned>(ceil_div<int64_t>(desc.hidden, kTileRows)));
  with_format(desc.format, [&](auto format) {
    if constexpr (format.value != ops::WeightFormat::kF32) {  // declined
      launch("gate_and_up_mma", queue, gate_and_up_mma<format.value>, gate_grid, threads_for(desc.hidden), 0, job);
      launch("down_mma", queue, down_mma<format.value>, down_grid, threads_for(desc.inner), 0, job);
    }
  });
}

}  // namespace tessera::backends::cuda
