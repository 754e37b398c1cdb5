// SPDX-License-Identifier: Apache-2.0
// moe_experts: tokens are grouped by expert on the device, then half a warp computes a weight row for a tile of an
// expert's tokens; or, on tensor cores, a thread block 16 weight rows.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/weight_ring.cuh"

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

// Slots of experts of other ranks are zero.
__device__ void zero_if_foreign(const Job& job, int64_t slot) {
  const int64_t expert = job.experts[slot] - job.first_expert;
  if (expert >= 0 && expert < job.num_local) return;
  for (int64_t i = threadIdx.x; i < job.hidden; i += blockDim.x) job.out.store(slot * job.hidden + i, 0);
}

// In the first thread block a thread counts, then lists, the slots of an expert: whole numbers in a fixed order. The
// others have a slot each.
__global__ void __launch_bounds__(kGroupThreads) group_by_expert(Job job) {
  __shared__ int2 s_end;  // slots and tiles of the experts so far
  wait_for_previous();
  if (blockIdx.x > 0) return zero_if_foreign(job, blockIdx.x - 1);
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
    const int2 end = s_end;
    int32_t at = end.x + sum_before(count).before, tile = end.y + sum_before(num_tiles).before;
    const int2 next = {at + count, tile + num_tiles};
    if (is_expert) s.begins[e + 1] = at + count, s.tile_begins[e + 1] = tile + num_tiles;
    for (int32_t left = count; left > 0; left -= kTokenTile, ++tile) {
      s.tiles[tile] = {static_cast<int32_t>(e), at + count - left, min(left, kTokenTile)};
    }
    for (int64_t slot = 0; count > 0 && slot < job.num_slots; ++slot) {
      if (job.experts[slot] == job.first_expert + e) s.slots[at++] = static_cast<int32_t>(slot);
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

// The same two on tensor cores: tiles of up to 8 slots by tiles of 16 rows, dealt out as weight_ring.cuh says. h is
// BF16, in the memory of Scratch::h.
static_assert(kTokenTile == kTileTokens);

// What both have in common: a tile is up to 8 slots of an expert by 16 of its `rows` rows.
class WorkTiles {
 public:
  struct Place {
    Tile slots;
    int64_t first_row;
  };
  __device__ WorkTiles(const Job& job, int64_t rows)
      : job_(job), rows_(rows), row_tiles_(static_cast<int>((rows + kTileRows - 1) / kTileRows)) {}

  __device__ int count() const { return job_.scratch.tile_begins[job_.num_local] * row_tiles_; }
  __device__ Place place(int tile) const {
    const int entry = tile / row_tiles_;
    return {job_.scratch.tiles[entry], static_cast<int64_t>(tile - entry * row_tiles_) * kTileRows};
  }

 protected:
  __device__ TileWeights weights_of(const ops::WeightView& view, const Place& place) const {
    return {view.data, view.block_scales, place.first_row, rows_};
  }
  // The slot of column `column` of the tile.
  __device__ int64_t slot(const Place& place, int column) const {
    return job_.scratch.slots[place.slots.first + min(column, place.slots.count - 1)];
  }
  __device__ int64_t slot_of_lane(const Place& place) const {
    return slot(place, static_cast<int>(threadIdx.x) % kWarp / 4);
  }
  __device__ bool is_there(const Place& place, int at) const {
    return place.first_row + row_of_sum(at) < rows_ && token_of_sum(at) < place.slots.count;
  }

  const Job& job_;

 private:
  const int64_t rows_;
  const int row_tiles_;
};

template <ops::WeightFormat kFormat>
class GateAndUpTiles final : public WorkTiles {
 public:
  static constexpr int kPasses = 2;
  __device__ explicit GateAndUpTiles(const Job& job) : WorkTiles(job, job.inner) {}

  __device__ TileWeights weights(const Place& place, int pass) const {
    return weights_of((pass == 0 ? job_.w1 : job_.w3)[place.slots.expert], place);
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    return static_cast<const uint16_t*>(job_.x.data) + slot_of_lane(place) / job_.top_k * job_.hidden;
  }
  __device__ void store(const Place& place, int at, const float (&sums)[2]) const {
    if (!is_there(place, at)) return;
    const int64_t slot_at = slot(place, token_of_sum(at)), expert = place.slots.expert;
    const float gate = sums[0] * WeightShare<kFormat>::kFactor * job_.w1[expert].tensor_scale;
    const float up = sums[1] * WeightShare<kFormat>::kFactor * job_.w3[expert].tensor_scale;
    const float h = swiglu_value(round_to(true, gate), round_to(true, up), job_.limit);
    Values{job_.scratch.h, true}.store(slot_at * job_.inner + place.first_row + row_of_sum(at),
                                       h * job_.routing[slot_at]);
  }
};

template <ops::WeightFormat kFormat>
class DownTiles final : public WorkTiles {
 public:
  static constexpr int kPasses = 1;
  __device__ explicit DownTiles(const Job& job) : WorkTiles(job, job.hidden) {}

  __device__ TileWeights weights(const Place& place, int) const {
    return weights_of(job_.w2[place.slots.expert], place);
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    return reinterpret_cast<const uint16_t*>(job_.scratch.h) + slot_of_lane(place) * job_.inner;
  }
  __device__ void store(const Place& place, int at, const float (&sums)[1]) const {
    if (!is_there(place, at)) return;
    job_.out.store(slot(place, token_of_sum(at)) * job_.hidden + place.first_row + row_of_sum(at),
                   sums[0] * WeightShare<kFormat>::kFactor * job_.w2[place.slots.expert].tensor_scale);
  }
};

template <ops::WeightFormat kFormat, class Tiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2) experts_mma(Job job, StreamShape shape) {
  wait_for_previous();
  const Tiles tiles(job);
  const int num_tiles = tiles.count();
  WeightRing<kFormat, kFewStages<kFormat>, Tiles> ring(shape, num_tiles, tiles, dynamic_shared<char>());
  stream_tiles(shape, num_tiles, tiles, ring);
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
  launch("group_by_expert", queue, group_by_expert, dim3(static_cast<unsigned>(1 + num_slots)), kGroupThreads, 0, job);
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
  } else if (!can_stream(desc.hidden) || !can_stream(desc.inner)) {
    why_not = "widths are not multiples of 128";
  } else {
    return true;
  }
  return false;
}

void moe_experts_mma(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  Job job{};
  const int64_t tiles = begin(desc, args, queue, job);
  const int64_t gate_tiles = tiles * ceil_div<int64_t>(desc.inner, kTileRows);
  const int64_t down_tiles = tiles * ceil_div<int64_t>(desc.hidden, kTileRows);
  const StreamShape gate = stream_shape(desc.hidden, gate_tiles), down = stream_shape(desc.inner, down_tiles);
  with_format(desc.format, [&](auto format) {
    constexpr ops::WeightFormat kFormat = format.value;
    if constexpr (kFormat != ops::WeightFormat::kF32) {  // declined
      launch("gate_and_up_mma", queue, experts_mma<kFormat, GateAndUpTiles<kFormat>>, dim3(gate.blocks(gate_tiles)),
             gate.threads(), gate.shared_bytes<kFormat>(), job, gate);
      launch("down_mma", queue, experts_mma<kFormat, DownTiles<kFormat>>, dim3(down.blocks(down_tiles)), down.threads(),
             down.shared_bytes<kFormat>(), job, down);
    }
  });
}

}  // namespace tessera::backends::cuda
