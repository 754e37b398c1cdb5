// SPDX-License-Identifier: Apache-2.0
// moe_experts in a4: slots are grouped by expert (cuda_common/expert_slots.cuh) and each expert's inputs quantised into
// tiles; gate and up are multiplied together, and what is made of them is quantised into tiles at once where the clamp
// bounds it (expert_activations.cuh); then down. Sums: block_scaled_sums.cuh.
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/scaled_experts.cuh"
#include "backends/sm100/block_scaled_sums.cuh"
#include "backends/sm100/expert_activations.cuh"
#include "backends/sm100/kernels.h"

namespace tessera::backends::sm100 {

namespace {

using cuda_common::ExpertWork, cuda_common::ScaledExperts, cuda_common::Values;

struct ExpertJob : ScaledExperts {
  float* weights;  // [positions] routing weights
};

// The tile of the work's tokens.
__device__ char* tile_of(char* tiles, int index, const ExpertWork& work, int64_t width) {
  return tiles + InputTile::bytes(work.first, index, width);
}

// Grid: tokens of a tile, those too that only fill a group of 8, by work. x, or h where nothing bounds it.
template <bool kIsX>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_expert_inputs(ExpertJob job) {
  cuda_common::wait_for_previous();
  const int index = static_cast<int>(blockIdx.y), token = static_cast<int>(blockIdx.x);
  if (index >= job.groups.totals[1]) return;
  const ExpertWork work = job.groups.work[index];
  const int rows = round_up<int>(work.count, InputTile::kGroup);
  if (token >= rows) return;
  const bool is_there = token < work.count;
  const int64_t width = kIsX ? job.hidden : job.inner;
  const uint16_t* values = nullptr;
  if (is_there) values = kIsX ? job.x_of(work, token) : job.h_of(work, token);
  const InputRow to(tile_of(kIsX ? job.tiles_x : job.tiles_h, index, work, width), rows, token);
  const float g = quantize_into(to, Values{const_cast<uint16_t*>(values), true}, 0, width, is_there);
  if (threadIdx.x != 0) return;
  (kIsX ? job.x_factors : job.h_factors)[work.first + token] = g;
  if (kIsX) job.weights[work.first + token] = is_there ? job.routing[job.slot_of(work, token)] : 0;
}

// Row tiles of some work are neighbours, so that blocks at work share inputs.
class ExpertTiles {
 public:
  struct Place {
    ExpertWork work;
    int index, first_row;  // of the work; of the tile
  };
  __device__ ExpertTiles(const ExpertJob& job, int64_t rows)
      : job_(job),
        row_tiles_(static_cast<int>(ceil_div<int64_t>(rows, PackedTile::kRows))),
        count_(job.groups.totals[1] * row_tiles_) {}

  __device__ int count() const { return count_; }
  __device__ Place place(int tile, int) const {
    const int index = tile / row_tiles_;
    return {job_.groups.work[index], index, tile % row_tiles_ * PackedTile::kRows};
  }
  __device__ int tokens(const Place& place) const { return place.work.count; }

 protected:
  __device__ static const char* weights_of(const void* data, const Place& place, int64_t width) {
    return static_cast<const char*>(data) + PackedTile::offset(place.first_row, width);
  }

  const ExpertJob& job_;
  const int row_tiles_, count_;
};

template <int kTileTokens>
class GateAndUpTiles : public ExpertTiles {
 public:
  static constexpr int kMatrices = 2, kTokens = kTileTokens, kBlocks = 1;

  __device__ explicit GateAndUpTiles(const ExpertJob& job) : ExpertTiles(job, job.inner) {}
  __device__ int64_t width() const { return job_.hidden; }
  __device__ const char* weights(const Place& place, int matrix) const {
    return weights_of(matrix == 0 ? place.work.data[0] : place.work.data[1], place, job_.hidden);
  }
  __device__ const char* inputs(const Place& place) const {
    return tile_of(job_.tiles_x, place.index, place.work, job_.hidden);
  }
  template <int kCount>
  __device__ void store(const Place& place, int row, int first_token, const float (&sums)[2][kCount]) const {
    float factors[kCount], weights[kCount], values[kCount];
    load_numbers(factors, job_.x_factors + place.work.first + first_token);
    load_numbers(weights, job_.weights + place.work.first + first_token);
    // Rows and tokens that only fill a tile have sums of zero, and such tokens have weight 0.
    job_.h_values(place.work, sums[0], sums[1], factors, weights, values);
    uint32_t pairs[TokenBlock::kPairs];
#pragma unroll
    for (int j = 0; j < TokenBlock::kPairs; ++j) {
      constexpr int kStep = TokenBlock::kPairs;
      pairs[j] = cuda_common::ptx::round_to_bf16x2(values[j], kCount > kStep ? values[(j + kStep) % kCount] : 0);
    }
    if (job_.limit > 0) {
      store_scaled<kCount>(place, row, first_token, pairs);
    } else {
      store_rounded<kCount>(place, place.first_row + row, first_token, pairs);
    }
  }

 private:
  using Pairs = uint32_t[TokenBlock::kPairs];  // of token j and j + 8

  template <int kCount>
  __device__ void store_rounded(const Place& place, int inner_row, int first_token, const Pairs& pairs) const {
    if (inner_row >= job_.inner) return;
    uint16_t* to = job_.h_of(place.work, first_token) + inner_row;
#pragma unroll
    for (int j = 0; j < kCount; ++j, to += job_.inner) {
      if (first_token + j >= place.work.count) break;
      *to = static_cast<uint16_t>(pairs[j % TokenBlock::kPairs] >> (j < TokenBlock::kPairs ? 0 : 16));
    }
  }

  // Quantises what the threads of a warp have: of 32 rows, two blocks of 16, kCount tokens.
  template <int kCount>
  __device__ void store_scaled(const Place& place, int row, int first_token, const Pairs& pairs) const {
    const TokenBlock mine(pairs);
    const int token = first_token + mine.token(), rows = round_up<int>(place.work.count, InputTile::kGroup);
    if (mine.token() >= kCount) return;
    const int position = place.work.first + token;
    const float g = numeric::nvfp4_bounded_activation_scale(job_.weights[position], job_.limit);
    if (place.first_row == 0 && row < numeric::kNvfp4Block) job_.h_factors[position] = g;
    const InputRow to(tile_of(job_.tiles_h, place.index, place.work, job_.inner), rows, token);
    const int block = (place.first_row + row) / numeric::kNvfp4Block;
    mine.store(to, block, g);
    // Columns behind the last tile of rows, up to a whole stage.
    constexpr int kTileBlocks = PackedTile::kRows / numeric::kNvfp4Block;
    const bool is_last = place.first_row / PackedTile::kRows + 1 == row_tiles_;
    if (is_last && row_tiles_ % (PackedTile::kBlocks / kTileBlocks) != 0) to.store(block + kTileBlocks, 0, 0);
  }
};

template <int kTileTokens>
class DownTiles : public ExpertTiles {
 public:
  static constexpr int kMatrices = 1, kTokens = kTileTokens, kBlocks = 1;

  __device__ explicit DownTiles(const ExpertJob& job) : ExpertTiles(job, job.hidden) {}
  __device__ int64_t width() const { return job_.inner; }
  __device__ const char* weights(const Place& place, int) const {
    return weights_of(place.work.data[2], place, job_.inner);
  }
  __device__ const char* inputs(const Place& place) const {
    return tile_of(job_.tiles_h, place.index, place.work, job_.inner);
  }
  template <int kCount>
  __device__ void store(const Place& place, int row, int first_token, const float (&sums)[1][kCount]) const {
    const int64_t out_row = place.first_row + row;
    if (out_row >= job_.hidden) return;
    const int position = place.work.first + first_token;
    float factors[kCount];
    load_numbers(factors, job_.h_factors + position);
    uint16_t* const to = job_.out + out_row;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      const int2 slots = *reinterpret_cast<const int2*>(job_.groups.slots + position + j);  // -1: none
      const float scale = place.work.tensor_scales[2];
      const uint32_t both = cuda_common::ptx::round_to_bf16x2(sums[0][j] * (factors[j] * scale),
                                                              sums[0][j + 1] * (factors[j + 1] * scale));
      if (slots.x >= 0) to[slots.x * job_.hidden] = static_cast<uint16_t>(both);
      if (slots.y >= 0) to[slots.y * job_.hidden] = static_cast<uint16_t>(both >> 16);
    }
  }
};

int64_t take_workspace(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, void* base,
                       ExpertJob& job) {
  cuda_common::Workspace workspace(base);
  const int64_t positions = cuda_common::most_positions(desc, num_slots);
  const int64_t work = cuda_common::most_work(desc, num_slots, work_slots);
  cuda_common::take_slot_groups(desc, num_slots, work_slots, workspace, job.groups);
  job.tiles_x = workspace.take<char>(InputTile::bytes(positions, work, desc.hidden));
  job.tiles_h = workspace.take<char>(InputTile::bytes(positions, work, desc.inner));
  if (desc.swiglu_limit <= 0) job.h = workspace.take<uint16_t>(positions * desc.inner);
  job.x_factors = workspace.take<float>(positions);
  job.h_factors = workspace.take<float>(positions);
  job.weights = workspace.take<float>(positions);
  return workspace.used();
}

template <template <int> class Tiles>
void launch_map(const char* name, const device::Queue& queue, int64_t most_work, int64_t rows, const ExpertJob& job) {
  const int64_t tiles = most_work * ceil_div<int64_t>(rows, PackedTile::kRows);
  const int64_t multiprocessors = cuda_common::multiprocessors();
  if (job.work_slots == kFewTileTokens) {
    launch_sums<Tiles<kFewTileTokens>>(name, queue, tiles, job, multiprocessors);
  } else {
    launch_sums<Tiles<kMostTileTokens>>(name, queue, tiles, job, multiprocessors);
  }
}

}  // namespace

bool moe_experts_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  return cuda_common::scaled_experts_support(desc, why_not);
}

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  ExpertJob job{};
  return take_workspace(desc, max_tokens * desc.top_k, kFewTileTokens, nullptr, job);  // most entries of work
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  ExpertJob job{cuda_common::scaled_experts(desc, args, expert_tile_slots(desc, args.num_tokens)), nullptr};
  take_workspace(desc, job.num_slots, job.work_slots, args.workspace, job);
  cuda_common::group_slots(job, job.groups, queue);
  const int64_t most_work = cuda_common::most_work(desc, job.num_slots, job.work_slots);
  const int64_t tile_rows = round_up<int64_t>(std::min<int64_t>(job.work_slots, job.num_slots), InputTile::kGroup);
  const dim3 rows(static_cast<unsigned>(tile_rows), static_cast<unsigned>(most_work));
  cuda_common::launch("quantize_x", queue, quantize_expert_inputs<true>, rows, kQuantizeThreads, 0, job);
  launch_map<GateAndUpTiles>("gate_and_up_tcgen05", queue, most_work, desc.inner, job);
  if (desc.swiglu_limit <= 0) {
    cuda_common::launch("quantize_h", queue, quantize_expert_inputs<false>, rows, kQuantizeThreads, 0, job);
  }
  launch_map<DownTiles>("down_tcgen05", queue, most_work, desc.hidden, job);
}

}  // namespace tessera::backends::sm100
