// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles of the experts' maps, for the kernels of wide_sums.cuh, few_experts.cuh and few_sums.cuh (Shape: Wide or Few):
// an entry of work by some of a matrix's rows.
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/cuda_common/swiglu_values.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_shares.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/moe_job.cuh"
#include "backends/sm90/uniform.cuh"

namespace tessera::backends::sm90 {

namespace ptx = cuda_common::ptx;

class WorkTiles {
 public:
  static constexpr auto kFormat = ops::WeightFormat::kNvfp4;
  static constexpr bool kFolds = false;
  static constexpr bool kKnowsWeights = false;  // chosen by the kernel before
  static constexpr int kTileTokens = 0;         // as many as it happens
  struct Place {
    const ExpertWork* work;
    int first_row;
  };
  // Of `matrix`: 0 for w1 and w3, 2 for w2.
  __device__ WorkTiles(const MoeJob& job, int matrix, int tile_rows)
      : job_(job),
        matrix_(matrix),
        tile_rows_(tile_rows),
        row_tiles_((rows() + tile_rows - 1) / tile_rows),
        count_(uniform(job.scratch.totals[1]) * row_tiles_) {}

  __device__ int width() const { return static_cast<int>(matrix_ == 2 ? job_.padded_inner : job_.hidden); }
  __device__ int count() const { return count_; }
  __device__ int row_tiles() const { return row_tiles_; }  // of an entry of work
  __device__ Place place(int tile) const {
    const int entry = tile / row_tiles_;
    return {job_.scratch.work + entry, (tile - entry * row_tiles_) * tile_rows_};
  }
  __device__ const char* inputs(const Place& place) const {
    // What comes before is as long in every layout.
    return (matrix_ == 2 ? job_.scratch.h : job_.scratch.x) + ProductInputs::bytes(place.work->first, width());
  }
  __device__ int tokens(const Place& place) const { return place.work->count; }

 protected:
  using Layout = cuda_common::PackedNvfp4;
  using Share = cuda_common::PackedShare<kFormat>;

  __device__ int64_t columns() const { return matrix_ == 2 ? job_.inner : job_.hidden; }
  __device__ int rows() const { return static_cast<int>(matrix_ == 2 ? job_.hidden : job_.inner); }
  // Of the sums of a position's token.
  __device__ float x_factor(int32_t position) const {
    const float* factors = job_.scratch.x_factors;
    if (factors == nullptr) return 1;
    return factors[job_.token_of.quotient(static_cast<uint32_t>(job_.scratch.slots[position]))];
  }
  __device__ const char* unit_of(const Place& place, int matrix, int row) const {
    if (row >= rows()) return nullptr;
    return static_cast<const char*>(place.work->data[matrix]) + Layout::offset(row, 0, columns());
  }

  const MoeJob& job_;

 private:
  const int matrix_, tile_rows_, row_tiles_, count_;
};

// As many rows of w1 as of w3: a warp has 8 of both, those of w1 as its rows g, of w3 as g + 8. So a lane holds a row's
// gate and up, and writes h where the next map's copies find it.
template <class Shape>
class GateAndUpTiles final : public WorkTiles {
 public:
  using Inputs = typename Shape::Inputs;
  static constexpr int kUnits = Shape::kSlots / 2, kRows = kUnits * Layout::kRows;  // of a matrix

  __device__ explicit GateAndUpTiles(const MoeJob& job) : WorkTiles(job, 0, kRows) {}
  __device__ int last_unit_blocks() const { return Layout::kBlocks; }

  __device__ const char* unit(const Place& place, int slot) const {
    return unit_of(place, slot / kUnits, place.first_row + slot % kUnits * Layout::kRows);
  }
  __device__ Share share(const typename Shape::Weights& stage, int block, int, int warp, int lane) const {
    const int gate = warp / 2, up = kUnits + gate, half = warp % 2;
    const uint32_t scales =
        __byte_perm(stage.scales_of(gate, block, lane), stage.scales_of(up, block, lane), half == 0 ? 0x5410 : 0x7632);
    return {{stage.codes_of(gate, half, block, lane), stage.codes_of(up, half, block, lane)}, {scales, 0}};
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    constexpr int kGroups = kTokens / 8, kAtOnce = kGroups < 4 ? kGroups : 4;  // of 8 tokens
    const int count = uniform(place.work->count), first = place.work->first;
    const float gate_scale = place.work->tensor_scales[0], up_scale = place.work->tensor_scales[1];
    const int row = place.first_row + warp * 8 + lane % 4 * 2;  // once transposed
    const int lane_token = lane % 4 * 2;                        // the first of two, of 8
    float2 weights[kGroups], factors[kGroups];                  // loaded together, before any store
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float* from = job_.scratch.weights + first + j * 8 + lane_token;
      weights[j] = j * 8 < count ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
      factors[j] = {1, 1};
    }
    if (job_.scratch.x_factors != nullptr) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int token = j * 8 + lane_token;
        if (token < count) factors[j].x = x_factor(first + token);
        if (token + 1 < count) factors[j].y = x_factor(first + token + 1);
      }
    }
    char* const h_rows = job_.scratch.h + Inputs::bytes(first, job_.padded_inner);
    const auto place_of = [&](int column) {
      return h_rows + column / Inputs::kColumns * Inputs::stride(count) +
             Inputs::offset_of_pair(lane / 4, column % Inputs::kColumns);
    };
    char* const own = place_of(row);
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kAtOnce) {
      if (begin * 8 >= count) break;
      uint32_t both[2 * kAtOnce];
      float weight[2 * kAtOnce], h[2 * kAtOnce];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int j = begin + i / 2, n = i % 2;
        const float factor = n == 0 ? factors[j].x : factors[j].y;
        both[i] = ptx::bf16_pair(sums[j * 4 + n] * Share::kFactor * (factor * gate_scale),
                                 sums[j * 4 + 2 + n] * Share::kFactor * (factor * up_scale));
        weight[i] = n == 0 ? weights[j].x : weights[j].y;
      }
      cuda_common::swiglu_values(both, weight, job_.limit, h);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = begin + i, token = j * 8 + lane_token;
        const float first_h = token < count ? h[2 * i] : 0, second_h = token + 1 < count ? h[2 * i + 1] : 0;
        const uint32_t pair = ptx::transpose_8x8(ptx::bf16_pair(first_h, second_h));
        if (row < rows() && j * 8 < count) *reinterpret_cast<uint32_t*>(own + j * Inputs::kBytes) = pair;
      }
    }
    for (int column = row + rows(); column < job_.padded_inner; column += rows()) {
      char* const to = place_of(column);
      for (int j = 0; j * 8 < count && row < rows(); ++j) *reinterpret_cast<uint32_t*>(to + j * Inputs::kBytes) = 0;
    }
  }
};

// Job: a MoeJob, whose store_columns() has the outputs.
template <class Shape, class Job>
class DownTilesOf : public WorkTiles {
 public:
  static constexpr int kRows = Shape::kSlots * Layout::kRows;

  __device__ explicit DownTilesOf(const Job& job) : WorkTiles(job, 2, kRows) {}
  __device__ int last_unit_blocks() const { return Layout::last_unit_blocks(job_.inner); }

  __device__ const char* unit(const Place& place, int slot) const {
    return unit_of(place, 2, place.first_row + slot * Layout::kRows);
  }
  __device__ Share share(const typename Shape::Weights& stage, int block, int part, int warp, int lane) const {
    return stage.share_of(warp, block, part, lane);
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    const int count = uniform(place.work->count), first = place.work->first;
    constexpr int kGroups = kTokens / 8;  // of 8 tokens
    const float scale = place.work->tensor_scales[2];
    int32_t slot[kGroups];    // loaded together, before any store, as are
    float2 factors[kGroups];  // those of two tokens' sums
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int token = j * 8 + lane / 4;
      slot[j] = token < count ? job_.scratch.slots[first + token] : -1;
      factors[j] = {1, 1};
    }
    if (const float* h_factors = job_.scratch.h_factors; h_factors != nullptr) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int token = j * 8 + lane % 4 * 2;
        if (token < count) factors[j].x = h_factors[first + token];
        if (token + 1 < count) factors[j].y = h_factors[first + token + 1];
      }
    }
    const int row = place.first_row + warp * Layout::kRows + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (j * 8 >= count) break;
      const float by[2] = {factors[j].x * scale, factors[j].y * scale};
      const auto value = [&](int i) { return sums[j * 4 + i] * Share::kFactor * by[i % 2]; };
      const uint32_t low = ptx::transpose_8x8(ptx::bf16_pair(value(0), value(1)));
      const uint32_t high = ptx::transpose_8x8(ptx::bf16_pair(value(2), value(3)));
      static_cast<const Job&>(job_).store_columns(row < rows() ? slot[j] : -1, row, low, high);
    }
  }
};
template <class Shape>
class DownTiles : public DownTilesOf<Shape, MoeJob> {
 public:
  using DownTilesOf<Shape, MoeJob>::DownTilesOf;
};

// Down where w2's columns are whole units: of few tokens, asking at run time costs up to 1 % of a step.
template <class Down>
class OfWholeUnits final : public Down {
 public:
  using Down::Down;
  __device__ static constexpr int last_unit_blocks() { return cuda_common::PackedNvfp4::kBlocks; }
};

}  // namespace tessera::backends::sm90
