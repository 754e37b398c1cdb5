// SPDX-License-Identifier: Apache-2.0
#pragma once
// BF16 inputs in the order in which they are multiplied with packed NVFP4 weights (cuda_common/packed_units.h), in
// stretches that a bulk copy brings. Which column stands at which k of a product follows from the lanes' shares of the
// weights (cuda_common/weight_shares.cuh): of 128 columns product s (0 to 7) takes 32 t + 4 s + [0, 4) of each t.
//   block   8 rows by a layout's columns, 16 bytes a column
//   tile    [width / columns][ceil(rows / 8)] blocks, of the rows that are multiplied at once: one copy brings a
//   block's
//           columns
//   matrix  tiles one after another, all but the last of a multiple of 8 rows
// A layout says what a block is:
//   kHasAllRows                   whether rows that aren't there are zero, or anything
//   offset_of_pair(row, column)   where an even column and the one after it lie
//   row_of(place), load(values, place)   of the 16 bytes at `place`: their row, and they from that row's values on
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::sm90 {

template <int kBlockColumns>
struct ArrangedInputs {
  static constexpr int kRows = 8, kColumns = kBlockColumns, kBytes = kRows * kColumns * 2, kPlaces = kBytes / 16;

  // Of so many rows.
  TESSERA_HOST_DEVICE static constexpr int64_t bytes(int64_t rows, int64_t width) {
    return (rows + kRows - 1) / kRows * (width / kColumns) * kBytes;
  }
  // Between a tile's blocks of the same rows.
  TESSERA_HOST_DEVICE static constexpr int stride(int tile_rows) { return (tile_rows + kRows - 1) / kRows * kBytes; }
};

// wgmma's B (ptx::SharedOperand), 128 columns: [2 halves, of four products each][8 rows][128 bytes], where the 16 bytes
// at place c of row r lie at c ^ r, the 128-byte swizzle. Of a product's columns of t the first two stand at k = 2 t,
// the others at 2 t + 8.
struct ProductInputs : ArrangedInputs<128> {
  static constexpr bool kHasAllRows = true;
  static constexpr int kHalfBytes = kBytes / 2;

  TESSERA_HOST_DEVICE static constexpr int offset_of_pair(int row, int column) {
    const int t = column / 32, product = column % 32 / 4, is_second = column % 4 / 2;
    const int place = product % 4 * 2 + is_second;
    return product / 4 * kHalfBytes + row * 128 + (place ^ row) * 16 + t * 4;
  }
  TESSERA_HOST_DEVICE static constexpr int row_of(int place) { return place / 8 % 8; }
  __device__ static uint4 load(const uint16_t* values, int place) {
    const int in_row = place % 8 ^ row_of(place), product = place / (kPlaces / 2) * 4 + in_row / 2;
    values += 4 * product + in_row % 2 * 2;
    const auto pair = [&](int t) { return __ldg(reinterpret_cast<const uint32_t*>(values + 32 * t)); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }
};

// What lane (g, t) of a warp multiplies with mma_bf16, 512 columns: [8 rows][4 blocks of 128][4][4] 16 bytes, of row g
// columns 32 t + 8 i + [0, 8) of a block; in odd rows t's places of i and i ^ 1 are exchanged, so that lanes of two
// rows meet different banks. Rows lie one after another: of few tokens no more are copied than there are.
struct LaneInputs : ArrangedInputs<512> {
  static constexpr bool kHasAllRows = false;
  static constexpr int kRowBytes = kBytes / kRows, kRowPlaces = kRowBytes / 16;

  TESSERA_HOST_DEVICE static constexpr int place_of(int row, int block, int i, int t) {
    return row * kRowPlaces + ((i % 2 * 4 + t) ^ (row % 2 * 4)) + i / 2 * 8 + block * 16;
  }
  TESSERA_HOST_DEVICE static constexpr int offset_of_pair(int row, int column) {
    return place_of(row, column / 128, column % 32 / 8, column % 128 / 32) * 16 + column % 8 * 2;
  }
  TESSERA_HOST_DEVICE static constexpr int row_of(int place) { return place / kRowPlaces; }
  __device__ static uint4 load(const uint16_t* values, int place) {
    const int in_row = place % kRowPlaces ^ (row_of(place) % 2 * 4);
    return __ldg(reinterpret_cast<const uint4*>(values + in_row / 16 * 128 + in_row % 4 * 32 + in_row / 4 % 4 * 8));
  }
};

// Of these columns a thread block arranges at once: launches give each block so many.
constexpr int kArrangedColumns = 1024;
inline unsigned arranged_parts(int64_t width) {
  return static_cast<unsigned>((width + kArrangedColumns - 1) / kArrangedColumns);
}

// Arranges part `part` of 8 rows' columns, kArrangedColumns each, into blocks that begin at `to` (for column 0) and lie
// `stride` bytes apart; `values_of(r)`: row r's values, null where there is none. All threads of the block take part.
template <class Layout, class ValuesOf>
__device__ void arrange_rows(char* to, int stride, int64_t width, int part, const ValuesOf& values_of) {
  static_assert(kArrangedColumns % Layout::kColumns == 0);
  constexpr int kPlaces = Layout::kPlaces, kAtOnce = 4, kPartPlaces = kArrangedColumns / Layout::kColumns * kPlaces;
  const int end = min((part + 1) * kPartPlaces, static_cast<int>(width / Layout::kColumns) * kPlaces);
  const int threads = static_cast<int>(blockDim.x);
  for (int first = part * kPartPlaces + static_cast<int>(threadIdx.x); first < end; first += kAtOnce * threads) {
    uint4 loaded[kAtOnce];  // on their way together
    bool is_there[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int at = first + n * threads, place = at % kPlaces;
      const uint16_t* values = at < end ? values_of(Layout::row_of(place)) : nullptr;
      is_there[n] = values != nullptr;
      loaded[n] = is_there[n] ? Layout::load(values + at / kPlaces * Layout::kColumns, place) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int at = first + n * threads;
      if (at >= end || (!is_there[n] && !Layout::kHasAllRows)) continue;
      reinterpret_cast<uint4*>(to + static_cast<int64_t>(at / kPlaces) * stride)[at % kPlaces] = loaded[n];
    }
  }
}

}  // namespace tessera::backends::sm90
