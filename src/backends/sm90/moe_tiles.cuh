// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles of the experts' maps, for the kernels of wide_sums.cuh and few_sums.cuh (Shape: Wide or Few): an entry of work
// by some of a matrix's rows.
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_shares.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/moe_job.cuh"

namespace tessera::backends::sm90 {

class WorkTiles {
 public:
  static constexpr auto kFormat = ops::WeightFormat::kNvfp4;
  struct Place {
    const ExpertWork* work;
    int first_row;
  };
  // Of `matrix`: 0 for w1 and w3, 2 for w2.
  __device__ WorkTiles(const MoeJob& job, int matrix, int tile_rows)
      : job_(job), matrix_(matrix), tile_rows_(tile_rows), count_(job.scratch.totals[1] * row_tiles()) {}

  __device__ int width() const { return static_cast<int>(matrix_ == 2 ? job_.padded_inner : job_.hidden); }
  __device__ int count() const { return count_; }
  __device__ Place place(int tile) const {
    const int entry = tile / row_tiles();
    return {job_.scratch.work + entry, (tile - entry * row_tiles()) * tile_rows_};
  }
  __device__ const char* inputs(const Place& place) const {
    // What comes before is as long in every layout.
    return (matrix_ == 2 ? job_.scratch.h : job_.scratch.x) + ProductInputs::bytes(place.work->first, width());
  }
  __device__ int tokens(const Place& place) const { return place.work->count; }

 protected:
  using Layout = cuda_common::PackedNvfp4;
  using Share = cuda_common::PackedShare<kFormat>;

  __device__ int rows() const { return static_cast<int>(matrix_ == 2 ? job_.hidden : job_.inner); }
  // Of the sums of a slot's token.
  __device__ float x_factor(int32_t slot) const {
    const float* factors = job_.scratch.x_factors;
    return factors == nullptr ? 1.0f : factors[job_.token_of.quotient(static_cast<uint32_t>(slot))];
  }
  __device__ const char* unit_of(const Place& place, int matrix, int row) const {
    if (row >= rows()) return nullptr;
    return static_cast<const char*>(place.work->data[matrix]) + Layout::offset(row, 0, width());
  }

  const MoeJob& job_;

 private:
  __device__ int row_tiles() const { return (rows() + tile_rows_ - 1) / tile_rows_; }

  const int matrix_, tile_rows_, count_;  // constants but for the last
};

// As many rows of w1 as of w3: a warp has 8 of both, those of w1 as its rows g, of w3 as g + 8. So a lane holds a row's
// gate and up, and writes h where the next map's copies find it.
template <class Shape>
class GateAndUpTiles final : public WorkTiles {
 public:
  using Inputs = typename Shape::Inputs;
  static constexpr int kUnits = Shape::kSlots / 2, kRows = kUnits * Layout::kRows;  // of a matrix

  __device__ explicit GateAndUpTiles(const MoeJob& job) : WorkTiles(job, 0, kRows) {}

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
    const ExpertWork& work = *place.work;
    const int row = place.first_row + warp * 8 + lane % 4 * 2;  // once transposed
    const int32_t* slots = job_.scratch.slots + work.first;
    const float gate_scale = work.tensor_scales[0], up_scale = work.tensor_scales[1];
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {  // 8 tokens
      const int first_token = i * 2;
      if (first_token >= work.count) break;
      float h[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int token = first_token + lane % 4 * 2 + n;
        h[n] = 0;
        if (token >= work.count) continue;
        const int32_t slot = slots[token];
        const float factor = x_factor(slot);
        const float gate = cuda_common::round_to(true, sums[i + n] * Share::kFactor * (factor * gate_scale));
        const float up = cuda_common::round_to(true, sums[i + 2 + n] * Share::kFactor * (factor * up_scale));
        h[n] = cuda_common::swiglu_value(gate, up, job_.limit, [](float x) { return expf(x); }) * job_.routing[slot];
      }
      const uint32_t pair = cuda_common::ptx::transpose_8x8(cuda_common::bf16_pair(h[0], h[1]));
      if (row >= rows()) continue;
      char* columns =
          job_.scratch.h + Inputs::bytes(work.first, job_.padded_inner) + first_token / Inputs::kRows * Inputs::kBytes;
      const auto store = [&](int column, uint32_t value) {
        char* block = columns + column / Inputs::kColumns * Inputs::stride(work.count);
        *reinterpret_cast<uint32_t*>(block + Inputs::offset_of_pair(lane / 4, column % Inputs::kColumns)) = value;
      };
      store(row, pair);
      for (int column = row + rows(); column < job_.padded_inner; column += rows()) store(column, 0);
    }
  }
};

template <class Shape>
class DownTiles final : public WorkTiles {
 public:
  static constexpr int kRows = Shape::kSlots * Layout::kRows;

  __device__ explicit DownTiles(const MoeJob& job) : WorkTiles(job, 2, kRows) {}

  __device__ const char* unit(const Place& place, int slot) const {
    return unit_of(place, 2, place.first_row + slot * Layout::kRows);
  }
  __device__ Share share(const typename Shape::Weights& stage, int block, int part, int warp, int lane) const {
    return stage.share_of(warp, block, part, lane);
  }
  template <int kTokens>
  __device__ void store(const Place& place, int warp, int lane, const float (&sums)[kTokens / 2]) const {
    const ExpertWork& work = *place.work;
    const float scale = work.tensor_scales[2];
    const float* factors = job_.scratch.h_factors;
    const auto value = [&](int i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float factor = factors == nullptr || token >= work.count ? 1.0f : factors[work.first + token];
      return sums[i] * Share::kFactor * (factor * scale);
    };
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 2) {  // rows of 8, tokens of 8
      const uint32_t pair = cuda_common::ptx::transpose_8x8(cuda_common::bf16_pair(value(i), value(i + 1)));
      const int row = place.first_row + warp * Layout::kRows + i % 4 / 2 * 8 + lane % 4 * 2;
      const int token = i / 4 * 8 + lane / 4;
      if (row >= rows() || token >= work.count) continue;
      const int64_t slot = job_.scratch.slots[work.first + token];
      *reinterpret_cast<uint32_t*>(job_.out + slot * job_.hidden + row) = pair;
    }
  }
};

}  // namespace tessera::backends::sm90
