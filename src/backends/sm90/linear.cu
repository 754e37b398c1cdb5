// SPDX-License-Identifier: Apache-2.0
// linear with packed weights: many tokens by wide_sums.cuh, some by linear_chunks.cu, few by ring_maps.cu or the
// portable backend. What bounds it: the tensor cores' BF16 products.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/tiled_map.cuh"
#include "backends/sm90/arranged_tokens.h"
#include "backends/sm90/kernels.h"
#include "backends/sm90/linear_chunks.h"
#include "backends/sm90/linear_wide.h"
#include "backends/sm90/ring_maps.h"
#include "backends/sm90/wide_sums.cuh"

namespace tessera::backends::sm90 {

namespace {

using cuda_common::tile_tokens_of, cuda_common::wait_for_previous;
using ops::WeightFormat;

constexpr int kTileRows = Wide::kTileRows;  // whatever the weights

struct LinearJob : cuda_common::TiledMap {
  ArrangedTokens inputs;
  const float* scales;  // FP8's, of blocks
};

// Grid: 8 tokens by groups by parts of the columns.
__global__ void __launch_bounds__(256) arrange_inputs(ArrangedTokens tokens) {
  wait_for_previous();
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * ProductInputs::kRows, group = blockIdx.y;
  const int64_t tile_token = first_token / tokens.tile_tokens * tokens.tile_tokens;
  char* to = tokens.tile(group, tile_token) + (first_token - tile_token) / ProductInputs::kRows * ProductInputs::kBytes;
  arrange_rows<ProductInputs>(
      to, ProductInputs::stride(tokens.tokens_of(tile_token)), tokens.in, static_cast<int>(blockIdx.z), [&](int row) {
        const int64_t token = first_token + row;
        return token < tokens.num_tokens ? tokens.x + (token * tokens.groups + group) * tokens.in : nullptr;
      });
}

// Tiles of a group: bands of a few row tiles, token tiles, row tiles; so that blocks at work share inputs and weights.
template <WeightFormat kWeightFormat, bool kWeightsFold, int kProductTokens>
class LinearTiles : public cuda_common::MapTiles {
 public:
  static constexpr WeightFormat kFormat = kWeightFormat;
  static constexpr bool kFolds = kWeightsFold;
  static constexpr int kTileTokens = kProductTokens;
  static constexpr bool kKnowsWeights = true;
  using Layout = cuda_common::PackedUnit<kFormat>;
  using Share = typename WideOf<kFormat, kFolds>::Share;
  __device__ explicit LinearTiles(const LinearJob& job) : MapTiles(job, kTileRows), job_(job) {}

  __device__ int width() const { return static_cast<int>(job_.in); }
  __device__ int last_unit_blocks() const { return Layout::kBlocks; }
  __device__ Place place(int tile) const {
    constexpr int kBand = 8;
    const int group = tile / (row_tiles_ * token_tiles_), in_group = tile - group * row_tiles_ * token_tiles_;
    const int band = in_group / (kBand * token_tiles_), in_band = in_group - band * kBand * token_tiles_;
    const int rows = min(kBand, row_tiles_ - band * kBand);
    return {group, int64_t{band * kBand + in_band % rows} * kTileRows, int64_t{in_band / rows} * job_.tile_tokens};
  }
  __device__ const char* unit(const Place& place, int slot) const {
    const int64_t row = place.first_row + slot * Layout::kRows;
    if (row >= job_.out) return nullptr;
    return job_.data + Layout::offset(place.group * job_.out + row, 0, job_.in);
  }
  __device__ const float* block_scales(const Place& place, int slot) const {
    const int64_t row = min(place.first_row + slot * Layout::kRows, job_.out - 1);
    return job_.scales + cuda_common::packed_scale_at(place.group * job_.out + row, 0, job_.in);
  }
  __device__ const char* inputs(const Place& place) const { return job_.inputs.tile(place.group, place.first_token); }
  __device__ Share share(const typename WideOf<kFormat, kFolds>::Weights& stage, int block, int part, int warp,
                         int lane) const {
    return stage.template share_of<Share>(warp, block, part, lane);
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    const int64_t num_rows = job_.groups * job_.out;
    const auto value = [&](int i) { return sums[i] * Share::kFactor * job_.tensor_scale; };
    if (job_.y.is_bf16) {
      // A branch that leaves before the end would make the loop over tiles one of lanes that differ (uniform()).
      const int64_t row = place.first_row + warp * Layout::kRows + lane % 4 * 2;
      const int64_t first_token = place.first_token + lane / 4, step = num_rows * 8;
      // Of its tokens, every eighth, this lane stores those before the end.
      const int end = row < job_.out ? static_cast<int>(min(job_.num_tokens - first_token, int64_t{kTokens})) : 0;
      uint16_t* to = static_cast<uint16_t*>(job_.y.data) + first_token * num_rows + place.group * job_.out + row;
#pragma unroll
      for (int i = 0; i < kTokens / 2; i += 4, to += step) {  // tokens of 8
        const uint32_t low = ptx::transpose_8x8(ptx::bf16_pair(value(i), value(i + 1)));
        const uint32_t high = ptx::transpose_8x8(ptx::bf16_pair(value(i + 2), value(i + 3)));
        if (i * 2 < end) *reinterpret_cast<uint32_t*>(to) = low, *reinterpret_cast<uint32_t*>(to + 8) = high;
      }
      return;
    }
    const int64_t row_of_group = place.first_row + warp * Layout::kRows + lane / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 2) {  // rows of 8, tokens of 8
      const int64_t row = row_of_group + i % 4 / 2 * 8, token = place.first_token + i / 4 * 8 + lane % 4 * 2;
      float* y = static_cast<float*>(job_.y.data) + token * num_rows + place.group * job_.out + row;
      if (row < job_.out && token < job_.num_tokens) y[0] = value(i);
      if (row < job_.out && token + 1 < job_.num_tokens) y[num_rows] = value(i + 1);
    }
  }

 private:
  const LinearJob& job_;
};

}  // namespace

bool linear_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  return cuda::linear_packed_supports(desc, why_not);
}

// So much shared memory that a multiprocessor has two blocks at most: begun early, behind a kernel that leaves a few
// multiprocessors idle, they would crowd there, eight to each, and wait.
constexpr size_t kSpreadShared = 100 << 10;

void arrange_tokens(const ArrangedTokens& tokens, const device::Queue& queue) {
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(tokens.num_tokens, ProductInputs::kRows)),
                  static_cast<unsigned>(tokens.groups), arranged_parts(tokens.in));
  const bool fits_spread = int64_t{grid.x} * grid.y * grid.z <= int64_t{2} * cuda_common::multiprocessors();
  cuda_common::launch("arrange_inputs", queue, arrange_inputs, grid, 256, fits_spread ? kSpreadShared : 0, tokens);
}

int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens) {
  const int64_t chunks = linear_chunks_workspace({&desc, 1}, max_tokens);
  if (desc.in % kChunk != 0 || max_tokens <= kFewMapTokens) return chunks;
  return std::max(chunks, ArrangedTokens::bytes(desc.groups, max_tokens, desc.in));
}

void linear_wide(const ops::Linear::Desc& desc, const ops::Linear::Args& args, int32_t tile_tokens, bool is_arranged,
                 device::Queue& queue) {
  const LinearJob job{cuda_common::tiled_map(desc, args, tile_tokens),
                      {static_cast<const uint16_t*>(args.x.data), static_cast<char*>(args.workspace), desc.in,
                       desc.groups, args.num_tokens, tile_tokens},
                      static_cast<const float*>(args.weight.block_scales)};
  if (!is_arranged) arrange_tokens(job.inputs, queue);
  const int64_t tiles =
      desc.groups * ceil_div<int64_t>(desc.out, kTileRows) * ceil_div<int64_t>(args.num_tokens, tile_tokens);
  with_wide_tiles(desc.format, args.weight.scales_fold, tile_tokens, [&](auto format, auto folds, auto tokens) {
    launch_wide<LinearTiles<format.value, folds.value, tokens.value>>("linear_wide", queue, tiles, job);
  });
}

void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t multiprocessors = cuda_common::multiprocessors();
  const bool folds = args.weight.scales_fold;
  if (uses_ring({&desc, 1}, 1, folds, args.num_tokens, multiprocessors)) return linear_ring(desc, args, queue);
  const LinearChoice choice = linear_choice(desc, args.num_tokens, multiprocessors, folds);
  switch (choice.kernels) {
    case LinearKernels::kPortable:
      return cuda::linear_packed(desc, args, queue);
    case LinearKernels::kChunks:
      return linear_chunks({{&desc, 1}, args.x, &args.weight, &args.y, args.num_tokens, args.workspace},
                           choice.tile_tokens, queue);
    case LinearKernels::kWide:
      return linear_wide(desc, args, choice.tile_tokens, false, queue);
  }
}

}  // namespace tessera::backends::sm90
